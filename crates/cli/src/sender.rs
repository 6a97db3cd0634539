//! Login codes on the console, for trying things out.

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use stampede_core::Phone;
use stampede_engine::Sender;

#[derive(Debug, Default)]
pub struct Console {
    muted: AtomicBool,
}

impl Console {
    pub fn mute(&self, muted: bool) {
        self.muted.store(muted, Ordering::SeqCst);
    }
}

#[async_trait]
impl Sender for Console {
    async fn send(&self, phone: &Phone, code: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        if !self.muted.load(Ordering::SeqCst) {
            writeln!(std::io::stdout(), "  login code for {phone}: {code}")?;
        }
        Ok(())
    }
}
