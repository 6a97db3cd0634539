//! Whether a secret could be guessed, by simple rules: no list of words.

use std::collections::{BTreeMap, HashSet};

/// The minimum estimated entropy of a secret, in bits. The estimate for 128 random bits in hexadecimal digits is above 90.
const MIN_BITS: f64 = 80.0;

/// Whether a text has little entropy, consists mostly of repetitions, or mostly follows the alphabet or the keyboard.
pub fn is_predictable(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    estimated_bits(text.as_bytes()) < MIN_BITS || repeats(text.as_bytes()) || follows_a_sequence(text.as_bytes())
}

/// Estimates the entropy of a text, in bits: the entropy of its characters or of the steps between them, whichever is less (`abcdef…` has
/// many characters and one step), times its length.
fn estimated_bits(text: &[u8]) -> f64 {
    let steps = text.windows(2).map(|pair| pair[1].wrapping_sub(pair[0]));
    let per_char = entropy(text.iter().copied()).min(entropy(steps));
    #[expect(clippy::cast_precision_loss, reason = "a secret is short")]
    let length = text.len() as f64;
    per_char * length
}

/// Shannon entropy, in bits per value.
fn entropy(values: impl Iterator<Item = u8>) -> f64 {
    let (mut counts, mut all) = (BTreeMap::<u8, f64>::new(), 0.0);
    for value in values {
        *counts.entry(value).or_default() += 1.0;
        all += 1.0;
    }
    counts.values().map(|count| -count / all * (count / all).log2()).sum()
}

/// Whether more than a third of all groups of three characters occurred before. In random hexadecimal digits hardly any does.
fn repeats(text: &[u8]) -> bool {
    let groups = || text.windows(3);
    let different: HashSet<&[u8]> = groups().collect();
    different.len() * 3 < groups().count() * 2
}

/// The alphabet, and the rows and columns of a keyboard.
const SEQUENCES: [&str; 15] = [
    "abcdefghijklmnopqrstuvwxyz",
    "01234567890-=",
    "qwertyuiop[]",
    "asdfghjkl;'",
    "zxcvbnm,./",
    "1qaz",
    "2wsx",
    "3edc",
    "4rfv",
    "5tgb",
    "6yhn",
    "7ujm",
    "8ik,",
    "9ol.",
    "0p;/",
];

/// Whether more than two thirds of all characters are next to the one before them in a sequence, in either direction.
fn follows_a_sequence(text: &[u8]) -> bool {
    let is_next = |pair: &&[u8]| {
        let mut steps = SEQUENCES.iter().flat_map(|sequence| sequence.as_bytes().windows(2));
        steps.any(|step| *pair == step || (pair[0], pair[1]) == (step[1], step[0]))
    };
    let pairs = || text.windows(2);
    pairs().filter(is_next).count() * 3 > pairs().count() * 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    #[test]
    fn repetitions_and_sequences_are_predictable() {
        for text in [
            &"a".repeat(64),
            &"ab".repeat(40),
            &"1234567890".repeat(4),
            &"0123456789abcdef".repeat(4),
            "abcdefghijklmnopqrstuvwxyz0123456789",
            "password-password-password-password",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa7f3a",
            "changemechangemechangeme-changeme",
            "ChangeMe1changeme2CHANGEME3changeme4",
            "secret1secret2secret3secret4secret5",
            "qwertyuiopasdfghjklzxcvbnm1234567890",
            "0987654321POIUYTREWQlkjhgfdsamnbvcxz",
            "1qaz2wsx3edc4rfv5tgb6yhn7ujm8ik,9ol.",
        ] {
            assert!(is_predictable(text), "{text}");
        }
    }

    /// What `openssl rand -hex 16` and `-hex 32` make, and the server at its first start.
    #[test]
    fn random_secrets_are_not_predictable() {
        let mut random = StdRng::seed_from_u64(7);
        let mut least = f64::MAX;
        for _ in 0..4_000 {
            let short = format!("{:032x}", random.random::<u128>());
            let long = format!("{short}{:032x}", random.random::<u128>());
            least = least.min(estimated_bits(short.as_bytes()));
            assert!(!is_predictable(&short) && !is_predictable(&long), "{long}");
        }
        assert!(least > MIN_BITS + 5.0, "{least} bits are close to the minimum");
    }
}
