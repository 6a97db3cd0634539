//! What each lock promises, and what not.
