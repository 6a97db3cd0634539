//! A value and its times, in the process and in Redis.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use moka::Expiry;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What is known of a key. `None` as the value: there is none.
#[derive(Debug)]
pub(crate) struct Entry<V> {
    pub(crate) value: Option<Arc<V>>,
    /// After this it is refreshed in the background.
    pub(crate) fresh_until: Instant,
    /// How long the process keeps it.
    pub(crate) kept_for: Duration,
}

impl<V> Entry<V> {
    pub(crate) fn is_fresh(&self) -> bool {
        Instant::now() < self.fresh_until
    }
}

/// Every entry knows how long it lives.
#[derive(Debug)]
pub(crate) struct KeptFor;

impl<K, V> Expiry<K, Arc<Entry<V>>> for KeptFor {
    fn expire_after_create(&self, _: &K, entry: &Arc<Entry<V>>, _: Instant) -> Option<Duration> {
        Some(entry.kept_for)
    }

    fn expire_after_update(&self, _: &K, entry: &Arc<Entry<V>>, _: Instant, _: Option<Duration>) -> Option<Duration> {
        Some(entry.kept_for)
    }
}

/// In Redis: eight bytes of milliseconds since 1970 until which it is fresh, then JSON, or nothing if there is no value.
pub(crate) fn encode<V: Serialize>(value: Option<&V>, fresh_for: Duration) -> serde_json::Result<Vec<u8>> {
    let fresh_until = now_ms().saturating_add(u64::try_from(fresh_for.as_millis()).unwrap_or(u64::MAX));
    let mut bytes = fresh_until.to_be_bytes().to_vec();
    if let Some(value) = value {
        serde_json::to_writer(&mut bytes, value)?;
    }
    Ok(bytes)
}

/// The value, and for how long it is fresh. `None` if that cannot be read: written by another version, perhaps.
pub(crate) fn decode<V: DeserializeOwned>(bytes: &[u8]) -> Option<(Option<V>, Duration)> {
    let (until, json) = bytes.split_first_chunk::<8>()?;
    let fresh_for = Duration::from_millis(u64::from_be_bytes(*until).saturating_sub(now_ms()));
    let value = if json.is_empty() { None } else { Some(serde_json::from_slice(json).ok()?) };
    Some((value, fresh_for))
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
