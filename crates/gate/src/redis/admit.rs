//! Buying: one call of the gate for a batch of requests.

use std::sync::atomic::Ordering;

use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Decision, GateError};
use stampede_core::{Admission, Money, Refusal, SaleId, Timestamp};

use super::{EntryId, RedisGate};

impl RedisGate {
    /// Decides on requests, in their order. The new orders are in the outbox under the returned entry.
    pub async fn admit_batch(
        &self,
        sale: SaleId,
        requests: &[AdmitRequest],
    ) -> Result<Option<(Vec<Decision>, Option<EntryId>)>, GateError> {
        let current = self.current();
        let Some(open) = current.find(sale) else { return Ok(None) };
        let keys = self.sale_keys(sale);
        let mut args = Vec::with_capacity(5 + 2 * requests.len());
        args.push(open.epoch.0.to_string());
        args.push(open.seen_seq.load(Ordering::Relaxed).to_string());
        args.push(self.outbox_bound.to_string());
        args.push(self.channel());
        args.push(sale.to_string());
        for request in requests {
            args.push(request.user.to_string());
            args.push(request.order.to_string());
        }
        type Reply = (i64, u64, i64, i64, u32, String, Vec<String>);
        let (now, generation, price, seq, remaining, entry, answers): Reply =
            self.call(&current, &current.scripts.admit, &keys, &args).await?;
        if answers.len() != requests.len() {
            return Err(GateError::Unanswered);
        }
        let at = Timestamp::from_ms(now);
        let price = Money::from_cents(price).ok_or(GateError::Lost)?;
        let mut next = seq;
        let mut decisions = Vec::with_capacity(requests.len());
        for (request, answer) in requests.iter().zip(&answers) {
            let admission = match answer.as_str() {
                "a" => {
                    next += 1;
                    Admission::Admitted(request.order)
                }
                "r" => Admission::Admitted(request.order),
                "b" => Admission::Busy,
                answer => match answer.strip_prefix('h').map(str::parse) {
                    Some(Ok(held)) => Admission::AlreadyHas(held),
                    _ => Admission::Refused(parse_refusal(answer).ok_or(GateError::Unanswered)?),
                },
            };
            decisions.push(Decision { admission, epoch: open.epoch, generation, seq: next, price, at });
        }
        open.seen_seq.fetch_max(next, Ordering::Relaxed);
        open.remaining.store(remaining, Ordering::Relaxed);
        let entry = EntryId::parse(&entry);
        if entry.is_some() {
            open.has_entries.store(true, Ordering::Relaxed);
        }
        Ok(Some((decisions, entry)))
    }
}

/// The letter by which `admit.lua` names a refusal.
const fn refusal_letter(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::SoldOut => "s",
        Refusal::NotStarted => "n",
        Refusal::Ended => "e",
        Refusal::Paused => "p",
        Refusal::NoSuchSale => "d",
    }
}

fn parse_refusal(answer: &str) -> Option<Refusal> {
    Refusal::ALL.iter().copied().find(|&refusal| refusal_letter(refusal) == answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new refusal needs a letter of its own, which the script returns and its header explains.
    #[test]
    fn every_refusal_has_its_own_letter_in_the_script() {
        let script = include_str!("lua/admit.lua");
        for &refusal in Refusal::ALL {
            let letter = refusal_letter(refusal);
            assert!(!["a", "r", "h", "b"].contains(&letter), "{refusal:?} has the letter of another answer");
            assert_eq!(parse_refusal(letter), Some(refusal), "{refusal:?} shares its letter");
            assert!(script.matches(&format!("'{letter}'")).count() >= 2, "{refusal:?} is not in admit.lua");
        }
    }
}
