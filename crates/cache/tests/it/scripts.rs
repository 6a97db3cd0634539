//! The scripts say what they use.

#[test]
fn the_head_of_a_script_names_what_its_body_uses() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/lua");
    assert_eq!(stampede_testkit::lua::check_heads(folder).unwrap(), 8);
}
