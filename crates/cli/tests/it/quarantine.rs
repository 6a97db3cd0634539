//! A trouble of the database is never taken for a bad order; a bad order goes into quarantine, where an operator finds it.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use stampede_testkit::{Client, Reply};

use crate::shop::{Buyer, Kind, Place, Shop, TOKEN, command, ledger};

/// Runs a statement in the shop's database, as a database administrator would.
async fn execute(kind: Kind, place: &Place, sql: &str) {
    let (url, sql) = (place.url(), AssertSqlSafe(sql.to_owned()));
    match kind {
        Kind::Sqlite => {
            let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
            raw_sql(sql).execute(&mut connection).await.unwrap();
        }
        Kind::MariaDb => {
            let mut connection = sqlx::MySqlConnection::connect(&url).await.unwrap();
            raw_sql(sql).execute(&mut connection).await.unwrap();
        }
        Kind::Postgres => {
            let mut connection = sqlx::PgConnection::connect(&url).await.unwrap();
            raw_sql(sql).execute(&mut connection).await.unwrap();
        }
    }
}

/// Makes the database reject the orders of one user, with an error in the data.
fn reject_orders_of(kind: Kind, user: &str) -> String {
    match kind {
        Kind::Sqlite => format!(
            "CREATE TRIGGER rejecting BEFORE INSERT ON orders WHEN NEW.user_id = {user} AND NEW.live = 1
             BEGIN SELECT RAISE(ABORT, 'rejected on purpose'); END"
        ),
        Kind::MariaDb => format!(
            "CREATE TRIGGER rejecting BEFORE INSERT ON orders FOR EACH ROW
             IF NEW.user_id = {user} AND NEW.live = 1 THEN SIGNAL SQLSTATE '22000' SET MESSAGE_TEXT = 'rejected on purpose'; END IF"
        ),
        Kind::Postgres => format!(
            "CREATE FUNCTION rejecting() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 RAISE EXCEPTION 'rejected on purpose' USING ERRCODE = '22000'; END $$;
             CREATE TRIGGER rejecting BEFORE INSERT ON orders FOR EACH ROW
             WHEN (NEW.user_id = {user} AND NEW.live = 1) EXECUTE FUNCTION rejecting()"
        ),
    }
}

fn accept_orders_again(kind: Kind) -> &'static str {
    if kind == Kind::Postgres { "DROP TRIGGER rejecting ON orders" } else { "DROP TRIGGER rejecting" }
}

async fn buy(shop: &Shop, sale: impl std::fmt::Display, buyer: &Buyer) -> Reply {
    shop.client().await.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &Value::Null).await.unwrap()
}

async fn quarantine(shop: &Shop) -> Vec<Value> {
    let list = shop.client().await.get("/admin/v1/quarantine", TOKEN).await.unwrap();
    assert_eq!(list.status, 200);
    list.json()["orders"].as_array().unwrap().clone()
}

/// What `stampede quarantine` prints, and whether it succeeds.
fn quarantine_command(shop: &Shop, arguments: &[&str]) -> (bool, String) {
    let target = format!("http://{}", shop.address);
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.arg("quarantine").args(arguments).args(["--target", &target]).env("STAMPEDE_ADMIN_TOKEN", TOKEN);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

async fn until_quarantined(shop: &Shop) -> String {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(order) = quarantine(shop).await.first() {
            return order["id"].as_str().unwrap().to_owned();
        }
        assert!(Instant::now() < deadline, "never quarantined");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn open(place: &Place) -> Shop {
    let mut command = command(place);
    command.env("STAMPEDE__BUY__QUARANTINE_AFTER_MS", "1000").env("STAMPEDE__LOG__LEVEL", "off");
    Shop::run(command)
}

async fn a_rejected_order_can_be_retried_and_discarded(kind: Kind) {
    let place = Place::on(kind);
    let shop = open(&place);
    let buyers = shop.log_in(0, 4).await;
    let sale = shop.put_up(3).await;
    execute(kind, &place, &reject_orders_of(kind, &buyers[0].id)).await;
    let rejected = buy(&shop, sale, &buyers[0]).await;
    assert_eq!((rejected.status.as_u16(), rejected.text("code").as_str()), (503, "outcome_unknown"));
    assert_eq!(buy(&shop, sale, &buyers[1]).await.status, 201, "the queue moves");
    let id = until_quarantined(&shop).await;
    let one = shop.client().await.get(&format!("/admin/v1/quarantine/{id}"), TOKEN).await.unwrap();
    assert_eq!(one.text("user_id"), buyers[0].id);
    assert!(one.text("error").contains("rejected on purpose"), "{:?}", one.body);

    // Still rejected: it says why, and nothing has changed.
    let retry = format!("quarantine/{id}/retry");
    let failed = shop.admin(&retry, &Value::Null).await;
    assert_eq!((failed.status.as_u16(), failed.text("code").as_str()), (409, "not_recordable"));
    assert!(failed.text("detail").contains("rejected on purpose"), "{:?}", failed.body);
    assert_eq!(quarantine(&shop).await.len(), 1);
    let (listed, text) = quarantine_command(&shop, &["list"]);
    assert!(listed && text.contains(&id) && text.contains("1 order(s) in quarantine"), "{text}");
    let (shown, text) = quarantine_command(&shop, &["show", &id]);
    assert!(shown && text.contains("rejected on purpose"), "{text}");
    let (retried, text) = quarantine_command(&shop, &["retry", &id]);
    assert!(!retried && text.contains("stays in quarantine") && text.contains("rejected on purpose"), "{text}");

    execute(kind, &place, accept_orders_again(kind)).await;
    let retried = shop.admin(&retry, &Value::Null).await;
    assert_eq!((retried.status.as_u16(), retried.text("outcome").as_str()), (200, "recorded"));
    assert_eq!(shop.admin(&retry, &Value::Null).await.text("code"), "no_such_order", "once");
    let mine = buy(&shop, sale, &buyers[0]).await;
    assert_eq!((mine.status.as_u16(), mine.text("id")), (200, id));

    if kind == Kind::Postgres {
        execute(kind, &place, "DROP FUNCTION rejecting").await;
    }
    execute(kind, &place, &reject_orders_of(kind, &buyers[2].id)).await;
    assert_eq!(buy(&shop, sale, &buyers[2]).await.status, 503);
    let id = until_quarantined(&shop).await;
    assert_eq!(buy(&shop, sale, &buyers[3]).await.text("code"), "sold_out", "its stock stays taken");
    let (discarded, text) = quarantine_command(&shop, &["discard", &id]);
    assert!(discarded && text.contains("rejected"), "{text}");
    let again = shop.admin(&format!("quarantine/{id}/discard"), &Value::Null).await;
    assert_eq!(again.text("code"), "no_such_order");
    let deadline = Instant::now() + Duration::from_secs(20);
    while buy(&shop, sale, &buyers[3]).await.status != 201 {
        assert!(Instant::now() < deadline, "its stock never came back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let audit = shop.client().await.get("/admin/v1/audit", TOKEN).await.unwrap();
    for action in ["retry_quarantined", "discard_quarantined"] {
        assert!(String::from_utf8_lossy(&audit.body).contains(action), "{action} is on record");
    }
    let loaded = ledger(&place).await.ledger.load(sale).await.unwrap().unwrap();
    assert_eq!((loaded.sale.sold, loaded.marks.len()), (3, 3));
    assert!(shop.stop().success());
}

macro_rules! on_each_database {
    ($($module:ident = $kind:expr),*) => {
        $(mod $module {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_rejected_order_can_be_retried_and_discarded() {
                super::a_rejected_order_can_be_retried_and_discarded($kind).await;
            }
        })*
    };
}

on_each_database! { sqlite = Kind::Sqlite, mariadb = Kind::MariaDb, postgres = Kind::Postgres }

/// A server setting that makes every statement fail with an error that no list of outages names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unlisted_error_for_two_seconds_quarantines_nothing() {
    let kind = Kind::MariaDb;
    let server = kind.own_server();
    let place = Place::with(Some(kind.create_database(&server, server.port())));
    // The default time until quarantine, and the default time that a buyer waits.
    let mut command = command(&place);
    command.env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, 21).await;
    let sale = shop.put_up(20).await;
    execute(kind, &place, "SET GLOBAL max_prepared_stmt_count = 0").await;
    let crowd: Vec<_> = buyers[..20]
        .iter()
        .cloned()
        .map(|buyer| {
            let address = shop.address;
            tokio::spawn(async move {
                let deadline = Instant::now() + Duration::from_secs(60);
                let mut client = Client::connect(address).await.unwrap();
                loop {
                    let path = format!("/v1/sales/{sale}/orders");
                    let reply = client.post(&path, &buyer.token, &Value::Null).await.unwrap();
                    match reply.status.as_u16() {
                        200 | 201 => return,
                        503 => assert!(Instant::now() < deadline, "never answered"),
                        other => panic!("{other}: {:?}", reply.body),
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(2)).await;
    execute(kind, &place, "SET GLOBAL max_prepared_stmt_count = 16382").await;
    for one in crowd {
        one.await.unwrap();
    }
    assert_eq!(quarantine(&shop).await, Vec::<Value>::new());
    let loaded = ledger(&place).await.ledger.load(sale).await.unwrap().unwrap();
    assert_eq!((loaded.sale.sold, loaded.marks.len()), (20, 20));
    assert_eq!(buy(&shop, sale, &buyers[20]).await.text("code"), "sold_out");
    assert!(shop.stop().success());
}
