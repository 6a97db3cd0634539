//! One value per sale, created when it is first used.

use std::collections::HashMap;

use parking_lot::RwLock;
use stampede_core::SaleId;

use crate::error::Error;

/// `None` once closed.
#[derive(Debug)]
pub(super) struct PerSale<T>(RwLock<Option<HashMap<SaleId, T>>>);

impl<T> Default for PerSale<T> {
    fn default() -> Self {
        Self(RwLock::new(Some(HashMap::new())))
    }
}

impl<T> PerSale<T> {
    /// Calls `act` with the sale's value, which is created if there is none. [`Error::Busy`] once closed.
    pub(super) fn with<R>(
        &self,
        sale: SaleId,
        create: impl FnOnce() -> T,
        act: impl FnOnce(&T) -> R,
    ) -> Result<R, Error> {
        if let Some(values) = &*self.0.read()
            && let Some(value) = values.get(&sale)
        {
            return Ok(act(value));
        }
        let mut values = self.0.write();
        let Some(values) = &mut *values else { return Err(Error::Busy) };
        Ok(act(values.entry(sale).or_insert_with(create)))
    }

    pub(super) fn remove(&self, sale: SaleId) -> Option<T> {
        self.0.write().as_mut().and_then(|values| values.remove(&sale))
    }

    /// Takes all values; no more are created.
    pub(super) fn close(&self) -> impl Iterator<Item = T> {
        let values = self.0.write().take();
        values.into_iter().flat_map(HashMap::into_values)
    }
}
