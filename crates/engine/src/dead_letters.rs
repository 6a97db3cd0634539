//! What an operator does with messages of the queue that could not be read. Their orders hold marks, so they are recorded from these when
//! gate and ledger are compared; a dead letter is needed only if the marks are lost as well.

use stampede_core::Code;
use stampede_queue::{DeadLetter, DeadLetterId};

use crate::engine::Engine;
use crate::error::Error;

/// How many dead letters are searched for one.
const MAX_SEARCHED: usize = 10_000;

impl Engine {
    /// The oldest dead letters.
    pub async fn dead_letters(&self, limit: usize) -> Result<Vec<DeadLetter>, Error> {
        self.tier.dead_letters(limit).await
    }

    pub async fn dead_letter(&self, id: DeadLetterId) -> Result<DeadLetter, Error> {
        let letters = self.tier.dead_letters(MAX_SEARCHED).await?;
        letters.into_iter().find(|letter| letter.id == id).ok_or(Error::Plain(Code::NotFound))
    }

    /// Puts a dead letter into the queue again. If it still cannot be read, it becomes a dead letter again.
    pub async fn retry_dead_letter(&self, id: DeadLetterId) -> Result<(), Error> {
        self.removed(self.tier.remove_dead_letter(id, true).await?)
    }

    /// Removes a dead letter.
    pub async fn discard_dead_letter(&self, id: DeadLetterId) -> Result<(), Error> {
        self.removed(self.tier.remove_dead_letter(id, false).await?)
    }

    fn removed(&self, found: bool) -> Result<(), Error> {
        if found { Ok(()) } else { Err(Error::Plain(Code::NotFound)) }
    }
}
