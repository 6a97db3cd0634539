//! Pages of lists.

use std::ops::RangeInclusive;

use serde::Deserialize;
use stampede_core::ids::InvalidId;

use crate::problem::Problem;

/// The size of a page of at most 100, 20 by default.
pub(crate) fn page_size(limit: Option<u32>) -> Result<u32, Problem> {
    page_size_within(limit, 20, 1..=100)
}

pub(crate) fn page_size_within(limit: Option<u32>, default: u32, allowed: RangeInclusive<u32>) -> Result<u32, Problem> {
    let limit = limit.unwrap_or(default);
    if allowed.contains(&limit) {
        return Ok(limit);
    }
    Err(Problem::invalid("limit", format!("must be between {} and {}", allowed.start(), allowed.end())))
}

/// Where the next page starts: at the last item of a full page. A page that is not full is the last one.
pub(crate) fn next<T, I>(page: &[T], limit: u32, id: impl FnOnce(&T) -> I) -> Option<I> {
    page.last().filter(|_| page.len() == limit as usize).map(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_size_has_a_default_and_a_range() {
        assert_eq!(page_size(None).ok(), Some(20));
        assert_eq!(page_size(Some(100)).ok(), Some(100));
        assert!(page_size(Some(0)).is_err() && page_size(Some(101)).is_err());
        assert_eq!(page_size_within(None, 1_000, 1..=100_000).ok(), Some(1_000));
    }

    #[test]
    fn only_a_full_page_has_a_next_one() {
        assert_eq!(next(&[1, 2, 3], 3, |n| *n), Some(3));
        assert_eq!(next(&[1, 2], 3, |n| *n), None);
        assert_eq!(next(&[0; 0], 3, |n| *n), None);
    }
}

/// The id of a row of a log; a string, as every id.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct RowId(pub(crate) i64);

impl TryFrom<String> for RowId {
    type Error = InvalidId;

    fn try_from(text: String) -> Result<Self, InvalidId> {
        text.parse().ok().filter(|id| *id > 0).map(Self).ok_or(InvalidId)
    }
}
