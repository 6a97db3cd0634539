//! Two threads on two cores.
//!
//! Linux likes to wake a thread on the core of whoever wakes it. When a commit is answered, one worker of the runtime wakes the other, and
//! both wake the clients: on a machine with two cores all of them end up in a line on one of them, while the other is idle. A worker that
//! stays on the second core keeps both in use. The first stays free to go where the kernel wants it, beside whatever else runs here.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};
use tokio::runtime::{Builder, Runtime};

/// The second worker of two, and the second core of two.
#[derive(Debug, Clone, Copy)]
pub struct Apart {
    worker: Pid,
    core: CpuSet,
}

impl Apart {
    /// Builds a runtime whose workers can be kept apart. With more cores than two, or fewer, the kernel knows best.
    pub fn build(runtime: &mut Builder) -> io::Result<(Runtime, Option<Self>)> {
        // What this process may use, and how much of that it is granted. Where that is not to be known, nothing is chosen.
        let (all, granted) = (sched_getaffinity(None), std::thread::available_parallelism());
        let all = all.ok().filter(|all| all.count() == 2 && granted.is_ok_and(|granted| granted.get() == 2));
        let second = all.and_then(|all| (0..CpuSet::MAX_CPU).rev().find(|&core| all.is_set(core)));
        let (Some(all), Some(second)) = (all, second) else { return Ok((runtime.build()?, None)) };
        let mut core = CpuSet::new();
        core.set(second);
        let started = AtomicUsize::new(0);
        let (tell, workers) = mpsc::sync_channel(2);
        runtime.worker_threads(2).on_thread_start(move || {
            // The workers are the first threads of a runtime.
            if started.fetch_add(1, Ordering::Relaxed) < 2 {
                // Whoever builds it waits for them.
                let _ = tell.send(gettid());
            } else if let Err(error) = sched_setaffinity(None, &all) {
                tracing::debug!(%error, "a thread stays on the core of the one that started it");
            }
        });
        let runtime = runtime.build()?;
        let worker = workers.iter().take(2).last();
        Ok((runtime, worker.map(|worker| Self { worker, core })))
    }

    /// From now on. A thread begins where the one stays that starts it, so what should run anywhere is better started before.
    pub fn keep(self) {
        if let Err(error) = sched_setaffinity(Some(self.worker), &self.core) {
            tracing::debug!(%error, "a worker cannot be kept on its core");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use super::*;

    /// Whatever a worker starts later may run anywhere, although a thread begins where the one stays that started it.
    #[test]
    fn only_a_worker_stays_where_it_is() {
        let cores = || sched_getaffinity(None).unwrap();
        let all = cores();
        let (runtime, Some(apart)) = Apart::build(&mut Builder::new_multi_thread()).unwrap() else { return };
        apart.keep();
        // Each holds a worker until the other has one too, and each thread that it starts until there are two.
        let (both, started) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let (tell, told) = mpsc::sync_channel(2);
        for _ in 0..2 {
            let (both, started, tell) = (both.clone(), started.clone(), tell.clone());
            runtime.spawn(async move {
                both.wait();
                let worker = cores();
                tokio::task::spawn_blocking(move || {
                    started.wait();
                    tell.send((worker, cores())).unwrap();
                });
            });
        }
        let told: Vec<_> = told.iter().take(2).collect();
        assert_eq!(told.iter().filter(|(worker, _)| *worker == apart.core).count(), 1);
        assert!(told.iter().all(|(_, thread)| *thread == all));
    }
}
