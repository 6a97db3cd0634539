//! What processes and the machine have used, as `/proc` tells it. Elsewhere than on Linux: nothing.

use std::time::Duration;

/// A tick of the processor's account, as `/proc` counts it.
const TICK: Duration = Duration::from_millis(10);

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The processor time that a process has used so far.
pub fn cpu(pid: u32) -> Option<Duration> {
    let stat = read(&format!("/proc/{pid}/stat"))?;
    // The name may hold spaces; it ends with the last parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let (user, system): (u32, u32) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(TICK * (user + system))
}

/// The most memory that a process has held at once, in bytes.
pub fn peak_rss(pid: u32) -> Option<u64> {
    let status = read(&format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The machine's account of its processors' time, in ticks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Account {
    all: u64,
    steal: u64,
}

pub fn account() -> Option<Account> {
    let stat = read("/proc/stat")?;
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
    Some(Account { all: fields.iter().take(8).sum(), steal: fields.get(7).copied().unwrap_or(0) })
}

impl Account {
    /// The part of the time since `before` that other guests of the machine had instead of us.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn steal_since(self, before: Self) -> f64 {
        let all = self.all.saturating_sub(before.all);
        if all == 0 { 0.0 } else { self.steal.saturating_sub(before.steal) as f64 / all as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_of_this_process() {
        let me = std::process::id();
        assert!(cpu(me).is_some());
        assert!(peak_rss(me).unwrap() > 1 << 20);
        assert!((0.0..=1.0).contains(&account().unwrap().steal_since(Account::default())));
        assert_eq!(cpu(u32::MAX), None);
    }
}
