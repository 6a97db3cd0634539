//! Deducting the stock in Redis before the database is asked. The table of orders has no guards of its own here, so that what Redis lets
//! through is seen.
//!
//! In order: [`separate_commands`], [`script`], [`inline_roll_back`], [`reconciled`]. This file has the failures that they go through.

pub mod inline_roll_back;
pub mod reconciled;
pub mod script;
pub mod separate_commands;

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::AsyncCommands as _;

use crate::driver::{Answer, Crowd, Shop, judge, send};
use crate::kill::KillPoint;
use crate::race::RacePoint;
use crate::run::Lab;
use crate::version::Version;
use crate::{Error, Measured, Result};

pub const VERSIONS: &[&Version] =
    &[&separate_commands::VERSION, &script::VERSION, &inline_roll_back::VERSION, &reconciled::VERSION];

/// Half of the people can be recorded, which is twice the stock.
const REJECTING: Crowd = Crowd { buyers: 40, tries: 1, stock: 10 };
/// How long Redis does not execute writes, and how long a roll-back waits for its answer.
const PAUSE_MS: u64 = 1_000;
const ROLL_BACK_TIMEOUT: Duration = Duration::from_millis(250);
/// How long the steps of a late roll-back may take.
const LATE_TIMEOUT: Duration = Duration::from_secs(10);

/// The database rejects the orders of every second user. The others must get the whole stock in the end.
async fn with_rejections<S: Shop>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let site = lab.site(version, REJECTING.stock, RacePoint::open()).await?;
    sqlx::query("ALTER TABLE orders ADD CONSTRAINT accepted CHECK (user_id % 2 = 1)").execute(&site.db()?).await?;
    let shop = Arc::new(S::open(&site).await?);
    let mut answers = send(&shop, REJECTING, lab.seed).await?;
    shop.settle().await?;
    // Those whose orders are accepted try once more, so that nothing that was returned stays unsold.
    for user in (1..=REJECTING.buyers).step_by(2) {
        if shop.buy(user).await? == Answer::Bought {
            answers.bought.insert(user);
        }
    }
    shop.settle().await?;
    judge(&site, REJECTING, &answers, measured).await?;
    site.close().await;
    Ok(())
}

/// A node dies after Redis has deducted an item and before the database has the order. Another node sells the rest, and that item too if it
/// finds out about it.
async fn with_dead_node<S: Shop>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    const USER: u64 = 1;
    let crowd = Crowd { buyers: 20, tries: 1, stock: 5 };
    let mut site = lab.site(version, crowd.stock, RacePoint::open()).await?;
    site.kill = KillPoint::at(1);
    let dying = S::open(&site).await?;
    let buying = tokio::spawn(async move { dying.buy(USER).await });
    site.kill.reached().await?;
    buying.abort();
    // The result is that it was cancelled.
    let _ = buying.await;
    let left: u64 = site.redis()?.get("stock").await?;
    if left != crowd.stock - 1 {
        return Err(Error::Failed(format!("{left} of {} are left in Redis after the node died", crowd.stock)));
    }
    measured.killed();

    site.kill = KillPoint::never();
    let shop = Arc::new(S::open(&site).await?);
    let mut answers = send(&shop, crowd, lab.seed).await?;
    shop.settle().await?;
    for user in 1..=crowd.buyers {
        if shop.buy(user).await? == Answer::Bought {
            answers.bought.insert(user);
        }
    }
    judge(&site, crowd, &answers, measured).await?;
    site.close().await;
    Ok(())
}

/// Redis executes a roll-back but answers too late, so that it is repeated after the user has bought again. A timeout is not a no.
async fn with_late_roll_back<S: Shop>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    const USER: u64 = 1;
    let crowd = Crowd { buyers: 20, tries: 2, stock: 5 };
    let mut site = lab.site(version, crowd.stock, RacePoint::open()).await?;
    site.before_roll_back = RacePoint::within(2, LATE_TIMEOUT);
    site.before_retry = RacePoint::within(2, LATE_TIMEOUT);
    let (db, mut redis) = (site.db()?, site.redis()?);
    let shop = Arc::new(S::open(&site).await?);

    // The database rejects the order, and Redis becomes slow before it is rolled back.
    sqlx::query("ALTER TABLE orders ADD CONSTRAINT nobody CHECK (user_id < 0)").execute(&db).await?;
    let rejected = tokio::spawn({
        let shop = shop.clone();
        async move { shop.buy(USER).await }
    });
    site.before_roll_back.arrived(1).await;
    sqlx::query("ALTER TABLE orders DROP CONSTRAINT nobody").execute(&db).await?;
    redis::cmd("CLIENT").arg("PAUSE").arg(PAUSE_MS).arg("WRITE").exec_async(&mut redis).await?;
    site.before_roll_back.pass().await;

    // The user buys again before the roll-back is repeated, and tries once more after it.
    let deadline = Instant::now() + LATE_TIMEOUT;
    while shop.buy(USER).await? != Answer::Bought {
        if Instant::now() > deadline {
            return Err(Error::TimedOut("the user buys again after the roll-back"));
        }
    }
    site.before_retry.pass().await;
    rejected.await.map_err(|error| Error::Failed(error.to_string()))??;
    shop.settle().await?;
    shop.buy(USER).await?;
    let answers = send(&shop, crowd, lab.seed).await?;
    shop.settle().await?;
    judge(&site, crowd, &answers, measured).await?;
    site.close().await;
    Ok(())
}
