//! Two threads on two cores.
//!
//! Linux likes to wake a thread on the core of whoever wakes it. When a commit is answered, one worker of the runtime wakes the other, and
//! both wake the clients: on a machine with two cores all of them end up in a line on one of them, while the other is idle. A worker that
//! stays on the second core keeps both in use. The first stays free to go where the kernel wants it, beside whatever else runs here.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::runtime::{Builder, Runtime};

/// Builds a runtime whose second worker of two stays on the second core of two. With more of them, or fewer, the kernel knows best.
pub fn build_apart(runtime: &mut Builder) -> io::Result<Runtime> {
    // What this process may use, and how much of that it is granted.
    let (all, granted) = (sched_getaffinity(None)?, std::thread::available_parallelism()?);
    let second = (0..CpuSet::MAX_CPU).rev().find(|&core| all.is_set(core));
    let (2, 2, Some(second)) = (all.count(), granted.get(), second) else { return runtime.build() };
    let mut alone = CpuSet::new();
    alone.set(second);
    let started = AtomicUsize::new(0);
    let (tell, ready) = mpsc::sync_channel(2);
    runtime.worker_threads(2).on_thread_start(move || {
        // The workers come first. Whatever is started by one that stays somewhere would stay there, too.
        let nth = started.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = sched_setaffinity(None, if nth == 1 { &alone } else { &all }) {
            tracing::debug!(%error, "cannot choose the cores of a thread");
        }
        if nth < 2 {
            // Whoever built the runtime waits for this.
            let _ = tell.send(());
        }
    });
    let runtime = runtime.build()?;
    // Nothing runs before both workers are where they belong, so no other thread can be taken for one.
    for () in ready.iter().take(2) {}
    Ok(runtime)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a worker starts later may run anywhere, although a thread begins where the one stays that started it.
    #[test]
    fn only_a_worker_stays_where_it_is() {
        let all = sched_getaffinity(None).unwrap();
        let runtime = build_apart(&mut Builder::new_multi_thread()).unwrap();
        runtime.block_on(async {
            for _ in 0..100 {
                let here = tokio::spawn(tokio::task::spawn_blocking(|| sched_getaffinity(None).unwrap()));
                assert!(here.await.unwrap().unwrap() == all);
            }
        });
    }
}
