//! Random faults with random seeds, for as long as `CHAOS_MINUTES` says; one round without it.
//! A failure prints its seed; `CHAOS_SEED=n` throws the same numbers again.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use stampede_core::failpoint;
use stampede_testkit::Dice;

use crate::crash::{Fault, rounds};
use crate::shop::Kind;

fn any_fault(dice: &mut Dice) -> Fault {
    match dice.within(0..6) {
        0 => Fault::random_kill(dice),
        n => Fault::random_abort(dice, failpoint::ALL[n as usize - 1]),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_fault_any_time() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a whole number"));
    let until = Instant::now() + Duration::from_secs(60 * number("CHAOS_MINUTES").unwrap_or(0));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let mut seed = number("CHAOS_SEED").unwrap_or(now.as_nanos() as u64 % 1_000_000);
    let mut all = 0;
    loop {
        let kind = [Kind::Sqlite, Kind::MariaDb, Kind::Postgres][seed as usize % 3];
        all += rounds(kind, seed, [any_fault as fn(&mut Dice) -> Fault; 2]).await.1;
        if Instant::now() >= until {
            break;
        }
        seed += 1;
    }
    eprintln!("{all} rounds, no violation");
}
