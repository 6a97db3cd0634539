//! The locks from outside, as their users have them.

mod keyed;
