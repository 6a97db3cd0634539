//! Enumerations whose values are words in the API and in the ledger.

/// Defines an enumeration with a word for each value: its name in snake case, as in JSON. A value cannot be forgotten in `ALL`.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum $name {
            $($(#[$value_doc])* $value,)*
        }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$value,)*];

            /// The word for it in the API and in the ledger.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$value => $word,)*
                }
            }

            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.as_str() == text)
            }
        }
    };
}
pub(crate) use words;
