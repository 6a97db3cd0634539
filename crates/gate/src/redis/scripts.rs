//! The scripts of one incarnation.

use stampede_redis::Script;

macro_rules! scripts {
    ($($name:ident,)*) => {
        #[derive(Debug)]
        pub(super) struct Scripts {
            $(pub(super) $name: Script,)*
        }

        impl Scripts {
            /// The incarnation is a part of every script's text, so that the scripts of another incarnation have other hashes.
            pub(super) fn new(incarnation: u64) -> Self {
                let script = |text: &str| Script::new(format!("local INCARNATION = '{incarnation}'\n{text}"));
                Self { $($name: script(include_str!(concat!("lua/", stringify!($name), ".lua"))),)* }
            }

            pub(super) fn all(&self) -> impl Iterator<Item = &Script> {
                [$(&self.$name,)*].into_iter()
            }
        }
    };
}

scripts! {
    admit,
    close,
    edit,
    open,
    release,
    remove,
    settle,
    snapshot,
}
