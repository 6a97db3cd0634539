//! The header comments of the scripts.

#[test]
fn script_headers_list_the_keys_and_arguments_that_are_used() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/lua");
    assert_eq!(stampede_testkit::lua::check_headers(folder).unwrap(), 8);
}
