//! Processor time and memory from `/proc`. `None` on other systems than Linux.

use std::time::Duration;

/// The unit of processor time in `/proc`.
const TICK: Duration = Duration::from_millis(10);

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The processor time of a process so far.
pub fn cpu(pid: u32) -> Option<Duration> {
    let stat = read(&format!("/proc/{pid}/stat"))?;
    // The process name may contain spaces; it ends with the last parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let (user, system): (u32, u32) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(TICK * (user + system))
}

/// The peak memory of a process, in bytes.
pub fn peak_rss(pid: u32) -> Option<u64> {
    let status = read(&format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The processor time of the machine, in ticks.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuTimes {
    all: u64,
    steal: u64,
}

pub fn cpu_times() -> Option<CpuTimes> {
    let stat = read("/proc/stat")?;
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
    Some(CpuTimes { all: fields.iter().take(8).sum(), steal: fields.get(7).copied().unwrap_or(0) })
}

impl CpuTimes {
    /// The fraction of the time since `before` that other guests of the host used.
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
    fn values_of_this_process_are_read() {
        let me = std::process::id();
        assert!(cpu(me).is_some());
        assert!(peak_rss(me).unwrap() > 1 << 20);
        assert!((0.0..=1.0).contains(&cpu_times().unwrap().steal_since(CpuTimes::default())));
        assert_eq!(cpu(u32::MAX), None);
    }
}
