//! The scripts of one incarnation.

use stampede_redis::Script;

macro_rules! scripts {
    ($($name:ident,)*) => {
        #[derive(Debug)]
        pub(super) struct Scripts {
            $(pub(super) $name: Script,)*
        }

        impl Scripts {
            /// The ledger and the incarnation are a part of every script's text, so that the scripts of another installation or
            /// incarnation have other hashes.
            pub(super) fn new(ledger: &str, incarnation: u64) -> Self {
                let script =
                    |text: &str| Script::new(format!("-- ledger {ledger}\nlocal INCARNATION = '{incarnation}'\n{text}"));
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
    forget_consumers,
    open,
    release,
    remove,
    settle,
    snapshot,
}
