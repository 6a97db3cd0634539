//! Failpoints in asynchronous code. They exist only with the cargo feature `failpoints`.

use stampede_core::failpoint;

/// Runs a failpoint on a thread that may block, so that what is held there, such as the rebuild of the sale `subject`, holds up nothing
/// else.
pub(crate) async fn hit_on_another_thread(name: &'static str, subject: &str) {
    if failpoint::is_set(name) {
        let subject = subject.to_owned();
        if let Err(error) = tokio::task::spawn_blocking(move || failpoint::hit_for(name, &subject)).await {
            tracing::error!(name, %error, "a failpoint failed");
        }
    }
}
