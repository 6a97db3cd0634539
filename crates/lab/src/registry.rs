//! All versions, in the order in which they follow each other.

use crate::version::Version;
use crate::{limits, locks, one_per_person, pre_deduction, queues, reads, sold_out, stock, tiers};

const FAMILIES: &[&[&Version]] = &[
    stock::VERSIONS,
    one_per_person::VERSIONS,
    pre_deduction::VERSIONS,
    queues::VERSIONS,
    locks::VERSIONS,
    sold_out::VERSIONS,
    reads::VERSIONS,
    limits::VERSIONS,
    tiers::VERSIONS,
];

pub fn all() -> impl Iterator<Item = &'static Version> {
    FAMILIES.iter().copied().flatten().copied()
}

/// The versions that these names select: names of versions, or of families; all without names.
///
/// # Errors
/// The first name that selects nothing.
pub fn select(names: &[String]) -> Result<Vec<&'static Version>, String> {
    let matches = |version: &Version, name: &String| version.name == name || version.family.name() == name;
    if let Some(unknown) = names.iter().find(|name| !all().any(|version| matches(version, name))) {
        return Err(unknown.clone());
    }
    let selected = all().filter(|version| names.is_empty() || names.iter().any(|name| matches(version, name)));
    Ok(selected.collect())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::Family;

    #[test]
    fn names_are_unique_and_begin_with_their_family() {
        let mut names = HashSet::new();
        for version in all() {
            assert!(names.insert(version.name), "{} twice", version.name);
            assert_eq!(version.name.split('/').next(), Some(version.family.name()), "{}", version.name);
        }
        for family in Family::ALL {
            assert!(all().any(|version| version.family == *family), "{family:?} has no version");
        }
    }

    /// The head of a file is what `--explain` prints.
    #[test]
    fn every_file_begins_with_its_story() {
        for version in all() {
            let story = version.story();
            for part in ["Adds:", "Wrong:", "Next:"] {
                assert!(story.contains(&format!("\n{part} ")), "{}: no {part:?} in the head of the file", version.name);
            }
            let (name, chinese) = (version.name, version.story_zh);
            let says_what_is_wrong = |line: &str| line.starts_with("问题：") || line.starts_with("代价：");
            assert!(chinese.lines().skip(1).any(says_what_is_wrong), "{name}: nothing is wrong in\n{chinese}");
            assert!(
                chinese.lines().next_back().is_some_and(|line| line.contains("下一")),
                "{name}: no end in\n{chinese}"
            );
        }
    }

    #[test]
    fn a_name_selects_a_version_or_a_family() {
        assert_eq!(select(&["stock/no-check".to_owned()]).unwrap().len(), 1);
        assert!(select(&["stock".to_owned()]).unwrap().len() > 3);
        assert_eq!(select(&[]).unwrap().len(), all().count());
        assert_eq!(select(&["stock/none".to_owned()]).unwrap_err(), "stock/none");
    }
}
