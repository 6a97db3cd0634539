//! The header comments of the Redis scripts.

#[test]
fn script_headers_match_their_scripts() {
    for (directory, scripts) in [("shared_sessions", 3), ("ids/lua", 1)] {
        let directory = format!("{}/src/{directory}", env!("CARGO_MANIFEST_DIR"));
        assert_eq!(stampede_testkit::lua::check_headers(directory).unwrap(), scripts);
    }
}
