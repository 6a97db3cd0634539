//! Prints login codes and alerts on the console, for development and demonstrations.

use std::io::Write as _;

use async_trait::async_trait;
use stampede_core::Phone;
use stampede_engine::Sender;

#[derive(Debug)]
pub struct Console;

#[async_trait]
impl Sender for Console {
    async fn send(&self, phone: &Phone, code: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        writeln!(std::io::stdout(), "  login code for {phone}: {code}")?;
        Ok(())
    }

    async fn send_text(&self, phone: &Phone, text: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        writeln!(std::io::stdout(), "  message for {phone}: {text}")?;
        Ok(())
    }
}
