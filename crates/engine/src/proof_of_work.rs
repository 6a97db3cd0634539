//! Proof of work before a login code is sent; off by default.
//!
//! A puzzle is a text signed by the server, with its expiry and its difficulty. Its solution is an answer for which the SHA-256 of
//! `PUZZLE:PHONE:ANSWER` begins with the required number of zero bits. Nothing is kept of a puzzle until it is solved; then it is remembered
//! until it expires, so that it works once. In tiers with Redis that holds over all nodes; while Redis does not answer, for each node by itself.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::Mutex;
use rand::RngExt as _;
use sha2::{Digest as _, Sha256};
use stampede_core::{Code, Phone, Timestamp};
use stampede_limit::{Check, Counters, Limit, Limiter, check_all};

use crate::error::Error;
use crate::token::TokenSigner;

/// How long a puzzle may take.
const EXPIRES_IN: Duration = Duration::from_secs(120);
/// How often a puzzle can be used over all nodes. It is remembered for longer than it is valid, because the clocks of nodes differ.
const ONCE: Limit = Limit { count: 1, window: EXPIRES_IN.saturating_mul(2) };
/// How many solved puzzles are remembered. Beyond that requests get 503 until some have expired.
const MAX_SOLVED: usize = 100_000;
const MAX_ANSWER: usize = 32;

const SIGNED: usize = 16 + 8 + 1;
const BYTES: usize = SIGNED + 16;
/// How long a puzzle is as text.
const TEXT_BYTES: usize = 55;

/// To be solved before a code is sent.
#[derive(Debug, Clone)]
pub struct Puzzle {
    pub text: String,
    /// How many zero bits the hash must begin with.
    pub bits: u8,
    pub expires_in: Duration,
}

/// A puzzle and an answer to it.
#[derive(Debug, Clone, Copy)]
pub struct Solution<'a> {
    pub puzzle: &'a str,
    pub answer: &'a str,
}

pub(crate) struct ProofOfWork {
    bits: u8,
    /// Solved puzzles by their random part, with their expiry.
    solved: Mutex<HashMap<[u8; 16], i64>>,
    /// Those that were solved on any node.
    used: Limiter<String>,
}

impl ProofOfWork {
    /// 0 bits: no proof is required.
    pub(crate) fn new(bits: u8, counters: &Counters) -> Self {
        // What this process has seen is in `solved`, so the limiter counts in Redis only.
        Self { bits, solved: Mutex::default(), used: Limiter::new(counters, "puzzles", ONCE, 0) }
    }

    pub(crate) fn puzzle(&self, token_signer: &TokenSigner, now: Timestamp) -> Puzzle {
        let mut bytes = [0; BYTES];
        bytes[..16].copy_from_slice(&rand::rng().random::<[u8; 16]>());
        bytes[16..24].copy_from_slice(&now.plus(EXPIRES_IN).ms().to_be_bytes());
        bytes[24] = self.bits;
        let mac = token_signer.puzzle(&bytes[..SIGNED]);
        bytes[SIGNED..].copy_from_slice(&mac);
        Puzzle { text: URL_SAFE_NO_PAD.encode(bytes), bits: self.bits, expires_in: EXPIRES_IN }
    }

    /// Whether the puzzle is solved for the first time; always true if no proof is required.
    pub(crate) async fn check(
        &self,
        token_signer: &TokenSigner,
        phone: &Phone,
        solution: Option<Solution<'_>>,
        now: Timestamp,
    ) -> Result<(), Error> {
        if self.bits == 0 {
            return Ok(());
        }
        let solved = solution.and_then(|solution| self.opened(token_signer, phone, solution, now));
        let (name, expires_ms) = solved.ok_or(Error::Plain(Code::ProofRequired))?;
        self.remember(name, expires_ms, now)?;
        let used =
            Check { limiter: &self.used, key: format!("{:032x}", u128::from_be_bytes(name)), maximum: ONCE.count };
        check_all(&[used]).await.map_err(|_| Error::Plain(Code::ProofRequired))
    }

    /// Notes that a puzzle was solved on this node, if it was not before.
    fn remember(&self, name: [u8; 16], expires_ms: i64, now: Timestamp) -> Result<(), Error> {
        let mut solved = self.solved.lock();
        if solved.len() >= MAX_SOLVED {
            solved.retain(|_, expires_ms| *expires_ms > now.ms());
            if solved.len() >= MAX_SOLVED {
                return Err(Error::Busy);
            }
        }
        match solved.insert(name, expires_ms) {
            None => Ok(()),
            Some(_) => Err(Error::Plain(Code::ProofRequired)),
        }
    }

    /// The random part and the expiry of the puzzle, if its signature is right, it has not expired, and this solves it.
    fn opened(
        &self,
        token_signer: &TokenSigner,
        phone: &Phone,
        solution: Solution<'_>,
        now: Timestamp,
    ) -> Option<([u8; 16], i64)> {
        let Solution { puzzle, answer } = solution;
        if puzzle.len() != TEXT_BYTES || answer.len() > MAX_ANSWER {
            return None;
        }
        let mut bytes = [0; BYTES];
        let length = URL_SAFE_NO_PAD.decode_slice(puzzle, &mut bytes).ok()?;
        if length != BYTES || !token_signer.is_puzzle(&bytes[..SIGNED], &bytes[SIGNED..]) {
            return None;
        }
        let name: [u8; 16] = bytes[..16].try_into().ok()?;
        let expires_ms = i64::from_be_bytes(bytes[16..24].try_into().ok()?);
        // The difficulty may have been raised since.
        if expires_ms <= now.ms() || bytes[24] < self.bits {
            return None;
        }
        let hash = Sha256::digest(format!("{puzzle}:{}:{answer}", phone.as_str()));
        (leading_zeros(&hash) >= u32::from(self.bits)).then_some((name, expires_ms))
    }
}

fn leading_zeros(hash: &[u8]) -> u32 {
    let zeros = hash.iter().take_while(|byte| **byte == 0).count();
    let whole = u32::try_from(zeros * 8).unwrap_or(u32::MAX);
    whole + hash.get(zeros).map_or(0, |byte| byte.leading_zeros())
}

impl fmt::Debug for ProofOfWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProofOfWork").field("bits", &self.bits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    fn solve(puzzle: &Puzzle, phone: &Phone) -> String {
        let hash = |answer: &u64| Sha256::digest(format!("{}:{}:{answer}", puzzle.text, phone.as_str()));
        let answer = (0_u64..).find(|answer| leading_zeros(&hash(answer)) >= u32::from(puzzle.bits));
        answer.unwrap().to_string()
    }

    fn proof_of_work(bits: u8) -> ProofOfWork {
        ProofOfWork::new(bits, &Counters::Local)
    }

    #[test]
    fn a_solved_puzzle_works_once_for_its_phone_and_in_time() {
        let (token_signer, now) = (TokenSigner::new(&[1; 32], None), Timestamp::from_ms(1_800_000_000_000));
        let (mine, other) = (Phone::parse("13800138000").unwrap(), Phone::parse("13800138001").unwrap());
        let work = proof_of_work(10);
        // Without Redis there is nothing to wait for.
        let check = |work: &ProofOfWork, phone: &Phone, solution: Option<Solution<'_>>, now| {
            work.check(&token_signer, phone, solution, now).now_or_never().expect("ready at once")
        };
        let refused = |phone: &Phone, puzzle: &str, answer: &str, now| {
            let heard = check(&work, phone, Some(Solution { puzzle, answer }), now);
            assert_eq!(heard.unwrap_err().code(), Code::ProofRequired);
        };
        assert_eq!(check(&work, &mine, None, now).unwrap_err().code(), Code::ProofRequired);
        let puzzle = work.puzzle(&token_signer, now);
        assert_eq!(puzzle.text.len(), TEXT_BYTES);
        let answer = solve(&puzzle, &mine);
        let wrong = (0_u64..)
            .map(|n| format!("wrong{n}"))
            .find(|answer| leading_zeros(&Sha256::digest(format!("{}:{}:{answer}", puzzle.text, mine.as_str()))) < 10);
        refused(&mine, &puzzle.text, &wrong.unwrap(), now);
        refused(&mine, &puzzle.text, &answer, now.plus(EXPIRES_IN));
        // For another phone the same answer is right only by a chance of 1 in 1024.
        if leading_zeros(&Sha256::digest(format!("{}:{}:{answer}", puzzle.text, other.as_str()))) < 10 {
            refused(&other, &puzzle.text, &answer, now);
        }
        let elsewhere = proof_of_work(10).puzzle(&TokenSigner::new(&[2; 32], None), now);
        refused(&mine, &elsewhere.text, &solve(&elsewhere, &mine), now);
        let easy = proof_of_work(1).puzzle(&token_signer, now);
        refused(&mine, &easy.text, &solve(&easy, &mine), now);

        let solution = Some(Solution { puzzle: &puzzle.text, answer: &answer });
        check(&work, &mine, solution, now).unwrap();
        refused(&mine, &puzzle.text, &answer, now);
        check(&proof_of_work(0), &mine, None, now).unwrap();
    }

    #[test]
    fn zeros_are_counted_in_bits() {
        assert_eq!(leading_zeros(&[0xff]), 0);
        assert_eq!(leading_zeros(&[0, 0, 0x10]), 19);
        assert_eq!(leading_zeros(&[0, 0]), 16);
    }
}
