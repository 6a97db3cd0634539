//! The header comments of the Redis scripts.

#[test]
fn script_headers_match_their_scripts() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/shared_sessions");
    assert_eq!(stampede_testkit::lua::check_headers(directory).unwrap(), 2);
}
