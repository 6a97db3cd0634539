//! Two shops with ledgers of their own use one Redis: nothing of one reaches the other.

use std::collections::BTreeSet;

use hyper::Method;
use serde_json::Value;
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Server, redis, until};

use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, read_only, verify};

/// Signs the tokens of both shops, so that one proves a token of the other and has to know its session.
const SESSION_KEY: &str = "5d0c81f7e92a46b3a1de7788f04c9b2563d2f01b9ce8574a0f6a2d91c37be4ff";
/// How often all buyers, who have one address, may try to buy in one shop.
const PER_ADDRESS: usize = 30;

/// A shop with three buyers and a sale.
struct Installation {
    storage: Storage,
    shop: Shop,
    /// The number of its database in Redis.
    database: String,
    ledger_id: String,
    buyers: Vec<Buyer>,
    sale: SaleId,
    history: Recorder,
}

impl Installation {
    async fn start(kind: Kind, redis: &Server, database: u8, stock: u32) -> Self {
        let storage = Storage::on(kind);
        let mut command = command(&storage);
        command.args(["--tier", "shared", "--redis", &format!("{}{database}", redis::url(redis.port()))]);
        command
            .env("STAMPEDE__IDS", "redis")
            .env("STAMPEDE_SESSION_KEY", SESSION_KEY)
            .env("STAMPEDE__BUY__PER_ADDRESS__COUNT", PER_ADDRESS.to_string())
            .env("STAMPEDE__BUY__PER_ADDRESS__WINDOW_MS", "3600000")
            // A slow machine changes no outcome.
            .env("STAMPEDE__LIMITS__REDIS_TIMEOUT_MS", "20000")
            .env("STAMPEDE__REDIS__RESPONSE_TIMEOUT_MS", "20000");
        let shop = Shop::run(command);
        let ledger = read_only(&storage).await;
        let ledger_id = ledger.gate_record("").await.unwrap().ledger_id;
        ledger.close().await;
        let (buyers, sale) = (shop.log_in(0, 3).await, shop.create_sale(stock).await);
        let (database, history) = (database.to_string(), Recorder::default());
        Self { storage, shop, database, ledger_id, buyers, sale, history }
    }

    async fn buy(&self, n: usize) -> Response {
        self.history.buy(&mut self.shop.client().await, self.sale, &self.buyers[n]).await.response
    }

    async fn edit(&self, what: &str) {
        let edited = self.shop.admin(&format!("sales/{}/{what}", self.sale), &Value::Null).await;
        assert_eq!(edited.status, 200, "{edited:?}");
    }

    /// Whether the shop accepts the token of a buyer, who may be one of the other shop.
    async fn accepts(&self, buyer: &Buyer) -> bool {
        let reply = self.shop.client().await.get("/v1/orders", &buyer.token).await.unwrap();
        assert!(matches!(reply.status.as_u16(), 200 | 401), "{reply:?}");
        reply.status == 200
    }

    async fn rebuilds(&self) -> f64 {
        self.shop.metric("stampede_gate_rebuilds_total").await
    }

    /// Runs a command in its database of Redis.
    fn ask(&self, redis: &Server, command: &[&str]) -> String {
        redis::ask(redis.port(), &[&["-n", self.database.as_str()][..], command].concat()).unwrap()
    }
}

/// The ids of ledgers in the names of keys or channels.
fn ledger_ids(names: &str) -> BTreeSet<String> {
    let id = |name: &str| {
        let rest = name.strip_prefix("stampede:").unwrap_or_else(|| panic!("{name:?} is not of a shop"));
        rest.split(':').next().unwrap_or_default().to_owned()
    };
    names.lines().filter(|name| !name.is_empty()).map(id).collect()
}

/// The shops use databases of Redis with these numbers. (Pub/sub ignores the numbers.)
async fn two_shops_on_one_redis_do_not_meet(databases: [u8; 2]) {
    let redis = redis::start().unwrap();
    let one = Installation::start(Kind::MariaDb, &redis, databases[0], 1).await;
    let other = Installation::start(Kind::Postgres, &redis, databases[1], 3).await;

    // Edits and the sell-out.
    one.edit("pause").await;
    assert_eq!((one.buy(0).await, other.buy(0).await), (Response::Paused, Response::Created));
    one.edit("resume").await;
    assert_eq!((one.buy(0).await, one.buy(1).await), (Response::Created, Response::SoldOut));
    assert_eq!(other.buy(1).await, Response::Created);

    // Sessions.
    for (mine, others) in [(&one, &other), (&other, &one)] {
        for buyer in &mine.buyers {
            assert!(mine.accepts(buyer).await && !others.accepts(buyer).await);
        }
    }
    let path = format!("/admin/v1/users/{}/sessions", one.buyers[0].id);
    let ended = one.shop.client().await.call(Method::DELETE, &path, TOKEN, &Value::Null).await.unwrap();
    assert_eq!(ended.status, 204);
    assert!(!one.accepts(&one.buyers[0]).await);
    for buyer in &other.buyers {
        assert!(other.accepts(buyer).await);
    }

    // A rebuild of the gate.
    let before = [one.rebuilds().await, other.rebuilds().await];
    let key = one.ask(&redis, &["keys", &format!("stampede:*:{{{}}}:live", one.sale)]);
    assert_eq!(one.ask(&redis, &["del", key.trim()]).trim(), "1");
    until("the gate is rebuilt", async || one.rebuilds().await > before[0]).await;
    let gate = format!("/admin/v1/sales/{}/gate", one.sale);
    until("the sale is open again", async || one.shop.client().await.get(&gate, TOKEN).await.unwrap().status == 200)
        .await;
    assert_eq!((one.buy(1).await, other.buy(2).await), (Response::SoldOut, Response::Created));
    assert_eq!(other.rebuilds().await, before[1]);

    // Rate limits: the buyers of both shops have the same address.
    let mut client = one.shop.client().await;
    let path = format!("/v1/sales/{}/orders", one.sale);
    let mut limited = 0;
    for _ in 0..PER_ADDRESS {
        let tried = client.post(&path, "", &Value::Null).await.unwrap();
        limited += usize::from(tried.status == 429);
    }
    assert!((1..PER_ADDRESS).contains(&limited), "{limited} of {PER_ADDRESS} were refused by the limit");
    assert_eq!(other.buy(0).await, Response::Already);

    // Everything in Redis has the id of its ledger.
    let both = BTreeSet::from([one.ledger_id.clone(), other.ledger_id.clone()]);
    assert_eq!(both.len(), 2);
    assert_eq!(ledger_ids(&one.ask(&redis, &["pubsub", "channels", "*"])), both);
    for installation in [&one, &other] {
        let expected =
            if databases[0] == databases[1] { both.clone() } else { BTreeSet::from([installation.ledger_id.clone()]) };
        assert_eq!(ledger_ids(&installation.ask(&redis, &["keys", "*"])), expected);
    }
    for (installation, sold) in [(&one, 1), (&other, 3)] {
        let Installation { history, storage, shop, sale, .. } = installation;
        assert_eq!(verify(history, storage, &[shop], *sale).await, sold);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_shops_in_one_database_of_redis_do_not_meet() {
    two_shops_on_one_redis_do_not_meet([0, 0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_shops_in_two_databases_of_redis_do_not_meet() {
    two_shops_on_one_redis_do_not_meet([0, 1]).await;
}
