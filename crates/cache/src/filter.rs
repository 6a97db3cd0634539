//! A Bloom filter in front of a source: whether a key can exist at all.
//!
//! A "no" counts only if every key that exists is known to be in the filter. That holds as long as
//!
//! - the filter was filled from the source, page by page, to the end;
//! - every new key is announced ([`Filter::announce`]) *before* it is written to the source, and written within
//!   [`FilterSettings::create_within`]; a filter that is being filled hears of it as well, and begins to read the source only when all that
//!   was announced before has been written;
//! - Redis still has what it was told: a filter that is missing, incomplete, or older than the last restart of Redis is no filter. Then
//!   everything is let through, and it is filled again in the background.
//!
//! Filling goes on for as long as the filter lives: an error, a panic or a page that does not come ends one try, and the next follows
//! after a pause.
//!
//! On a cluster nobody can tell whether a node was restarted, so there the shared filter never says no.

mod local;
mod shared;

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::builder::{Key, LONGEST};
use crate::remote::Remote;
use local::Local;
use shared::{Generation, Shared};

/// How a filter behaves.
#[derive(Debug, Clone, Copy)]
pub struct FilterSettings {
    /// How many keys it is made for. With more of them it lets more pass that do not exist.
    pub capacity: usize,
    /// Between the end of the announcement of a key and its being written to the source passes no more time than this. It takes so long
    /// until a filter is filled, and until then everything is let through.
    pub create_within: Duration,
    /// It is filled again this often, so that keys that are gone go. At least a tenth of a second.
    pub refill_every: Duration,
}

impl Default for FilterSettings {
    fn default() -> Self {
        let (create_within, refill_every) = (Duration::from_secs(10), Duration::from_secs(3600));
        Self { capacity: 1_000_000, create_within, refill_every }
    }
}

impl FilterSettings {
    fn clamped(self) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number below 2^32")]
        let most = (MAX_BITS / bits_per_key()) as usize;
        Self {
            capacity: self.capacity.clamp(1, most),
            // Not shorter: a key that is written later than the filter expects would be refused.
            create_within: self.create_within.min(LONGEST),
            refill_every: self.refill_every.clamp(MIN_REFILL, LONGEST),
        }
    }
}

fn bits_per_key() -> f64 {
    -FALSE_POSITIVES.ln() / (2f64.ln() * 2f64.ln())
}

/// One in two hundred that do not exist pass, at the capacity.
const FALSE_POSITIVES: f64 = 0.005;
/// The longest string that Redis takes, in bits, less a little.
const MAX_BITS: f64 = 4.0e9;
const MIN_REFILL: Duration = Duration::from_millis(100);
/// How long the source may take for a page of keys.
const PAGE_WITHIN: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Page<K> = Pin<Box<dyn Future<Output = Result<Vec<K>, BoxError>> + Send>>;

/// The new key could not be announced: Redis does not answer. Do not create it now, or another node may say that it does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the new key could not be announced, because Redis does not answer")]
pub struct Unannounced;

/// Whether a key can exist at all. Cheap to clone; see [`Builder::build_filtered`](crate::Builder::build_filtered).
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use stampede_cache::{Filter, FilterSettings};
///
/// let settings = FilterSettings { create_within: Duration::from_millis(10), ..FilterSettings::default() };
/// // The source has the keys 1 to 100; it is read in pages.
/// let filter = Filter::<u64>::local(settings, |after| async move {
///     let from = after.unwrap_or(0) + 1;
///     Ok::<_, std::io::Error>((from..=100).take(30).collect())
/// });
/// assert!(filter.may_exist(&1000).await, "nobody knows yet");
/// while !filter.is_current().await {
///     tokio::time::sleep(Duration::from_millis(5)).await;
/// }
/// assert!(filter.may_exist(&7).await && !filter.may_exist(&1000).await);
/// filter.announce(&1000).await?; // and then write it to the source
/// assert!(filter.may_exist(&1000).await);
/// # Ok(()) }
/// ```
pub struct Filter<K> {
    inner: Arc<Inner<K>>,
    _filling: Arc<Filling>,
}

struct Inner<K> {
    bits: Bits,
    settings: FilterSettings,
    keys_after: Box<dyn Fn(Option<K>) -> Page<K> + Send + Sync>,
    /// It has to be filled.
    wanted: Notify,
}

enum Bits {
    Local(Box<Local>),
    Shared(Box<Shared>),
}

/// Ends with the last filter.
struct Filling(AbortHandle);

impl Drop for Filling {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<K: Key> Filter<K> {
    /// In this process alone: right only where no other process creates keys.
    ///
    /// `keys_after` reads the source: a page of keys that come after this one, and the first page without one. An empty page is the end.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn local<F, E>(settings: FilterSettings, keys_after: impl Fn(Option<K>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Vec<K>, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let settings = settings.clamped();
        Self::new(Bits::Local(Box::new(Local::new(settings.capacity))), settings, keys_after)
    }

    /// In Redis, for all processes. One of them fills it. The name is a part of its keys in Redis.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn shared<F, E>(
        remote: &Remote,
        name: &str,
        settings: FilterSettings,
        keys_after: impl Fn(Option<K>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Vec<K>, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let settings = settings.clamped();
        let shared = Shared::new(remote.clone(), name, settings.capacity);
        Self::new(Bits::Shared(Box::new(shared)), settings, keys_after)
    }

    fn new<F, E>(
        bits: Bits,
        settings: FilterSettings,
        keys_after: impl Fn(Option<K>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Vec<K>, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let keys_after = Box::new(move |after: Option<K>| -> Page<K> {
            let page = keys_after(after);
            Box::pin(async move { page.await.map_err(Into::into) })
        });
        let inner = Arc::new(Inner { bits, settings, keys_after, wanted: Notify::new() });
        let filling = Filling(tokio::spawn(inner.clone().keep_filled()).abort_handle());
        Self { inner, _filling: Arc::new(filling) }
    }

    /// Tells the filter of a key that is about to be created. To be called before it is written to the source; and write it through
    /// [`Cache::update`](crate::Cache::update), because somebody may have asked for it before, and "there is none" be remembered.
    ///
    /// # Errors
    /// [`Unannounced`]: do not create it now.
    pub async fn announce(&self, key: &K) -> Result<(), Unannounced> {
        let text = key.to_string();
        match &self.inner.bits {
            Bits::Local(local) => local.announce(&text),
            Bits::Shared(shared) => shared.announce(&text).await?,
        }
        Ok(())
    }

    /// May the key exist? `true` also if nobody knows.
    pub async fn may_exist(&self, key: &K) -> bool {
        let text = key.to_string();
        let known = match &self.inner.bits {
            Bits::Local(local) => local.may_exist(&text),
            Bits::Shared(shared) => shared.may_exist(&text).await,
        };
        if known.is_none() {
            self.inner.wanted.notify_one();
        }
        known.unwrap_or(true)
    }

    /// Does a "no" count now?
    pub async fn is_current(&self) -> bool {
        self.inner.bits.is_current().await
    }
}

impl<K: Key> Inner<K> {
    async fn keep_filled(self: Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        loop {
            // Reading the source is the caller's code.
            let filled = AssertUnwindSafe(self.fill()).catch_unwind().await;
            match filled.unwrap_or_else(|_| Err("reading the source panicked".into())) {
                Ok(()) => {
                    pause = FIRST_PAUSE;
                    // Ends when the time is over, or before if the filter was lost.
                    let _ = tokio::time::timeout(self.settings.refill_every, self.found_missing()).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "the filter could not be filled; everything is let through");
                    tokio::time::sleep(pause).await;
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// Waits until a caller has found that there is no filter.
    async fn found_missing(&self) {
        loop {
            self.wanted.notified().await;
            // Perhaps that was before it was filled, or another process is filling it.
            tokio::time::sleep(FIRST_PAUSE).await;
            if !self.bits.is_current().await {
                return;
            }
        }
    }

    /// Fills it from the source, if that is for us to do.
    async fn fill(&self) -> Result<(), BoxError> {
        match &self.bits {
            Bits::Local(local) => {
                local.begin();
                tokio::time::sleep(self.settings.create_within).await;
                self.read_all(None).await?;
                local.finish();
            }
            Bits::Shared(shared) => {
                // If there is nothing to do, it is there and young, or somebody else is at it.
                if let Some((generation, guard)) = shared.begin(&self.settings).await? {
                    // An announcement counts from its call, and may take as long as Redis.
                    tokio::time::sleep(self.settings.create_within + shared.announced_within()).await;
                    let filled = async {
                        self.read_all(Some(&generation)).await?;
                        shared.finish(&generation).await
                    };
                    let filled = filled.await;
                    if filled.is_err() {
                        shared.drop_bits(&generation).await;
                    }
                    let released = guard.release().await;
                    filled?;
                    released?;
                }
            }
        }
        Ok(())
    }

    /// Reads the source to its end, into what is being filled.
    async fn read_all(&self, generation: Option<&Generation>) -> Result<(), BoxError> {
        let mut after: Option<K> = None;
        loop {
            let page = tokio::time::timeout(PAGE_WITHIN, (self.keys_after)(after.clone()));
            let page = page.await.map_err(|_| "the source did not give a page in time")??;
            let texts: Vec<String> = page.iter().map(ToString::to_string).collect();
            match (&self.bits, generation) {
                (Bits::Shared(shared), Some(generation)) => shared.add(generation, &texts).await?,
                (Bits::Local(local), _) => local.add(&texts),
                (Bits::Shared(_), None) => {}
            }
            let Some(last) = page.into_iter().next_back() else { return Ok(()) };
            let last = Some(last);
            if last == after {
                return Err("the source gives the same page again".into());
            }
            after = last;
        }
    }
}

impl Bits {
    async fn is_current(&self) -> bool {
        match self {
            Self::Local(local) => local.may_exist("").is_some(),
            Self::Shared(shared) => shared.may_exist("").await.is_some(),
        }
    }
}

impl<K> Clone for Filter<K> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), _filling: self._filling.clone() }
    }
}

impl<K> fmt::Debug for Filter<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Filter")
    }
}
