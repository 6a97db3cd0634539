//! A value with its expiry, in the process and in Redis.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use moka::Expiry;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A cached value, or `None` if the key does not exist in the source.
pub(crate) type Cached<V> = Option<Arc<V>>;

/// An entry of the local level.
#[derive(Debug)]
pub(crate) struct Entry<V> {
    pub(crate) value: Cached<V>,
    /// After this the entry is stale and is refreshed in the background.
    pub(crate) fresh_until: Instant,
    /// How long the local level keeps the entry.
    pub(crate) ttl: Duration,
}

impl<V> Entry<V> {
    pub(crate) fn is_fresh(&self) -> bool {
        Instant::now() < self.fresh_until
    }
}

/// Expires every entry after its own TTL.
#[derive(Debug)]
pub(crate) struct EntryExpiry;

impl<K, V> Expiry<K, Arc<Entry<V>>> for EntryExpiry {
    fn expire_after_create(&self, _: &K, entry: &Arc<Entry<V>>, _: Instant) -> Option<Duration> {
        Some(entry.ttl)
    }

    fn expire_after_update(&self, _: &K, entry: &Arc<Entry<V>>, _: Instant, _: Option<Duration>) -> Option<Duration> {
        Some(entry.ttl)
    }
}

/// The encoding in Redis: eight bytes with the Unix time in milliseconds until which the value is fresh, then JSON, or nothing if the key
/// does not exist.
pub(crate) fn encode<V: Serialize>(value: Option<&V>, fresh_for: Duration) -> serde_json::Result<Vec<u8>> {
    let fresh_until = now_ms().saturating_add(u64::try_from(fresh_for.as_millis()).unwrap_or(u64::MAX));
    let mut bytes = fresh_until.to_be_bytes().to_vec();
    if let Some(value) = value {
        serde_json::to_writer(&mut bytes, value)?;
    }
    Ok(bytes)
}

/// The value, and how long it is still fresh. `None` if it cannot be decoded, for example because another version of the program wrote it.
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
