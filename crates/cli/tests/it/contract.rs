//! The OpenAPI document as a contract: it matches a snapshot, and every reply in any test must match it.

use std::collections::HashMap;
use std::sync::LazyLock;

use hyper::{Method, StatusCode};
use jsonschema::Validator;
use serde_json::{Map, Value, json};
use stampede_core::Code;
use stampede_testkit::{Exchange, Reply};

use crate::shop::{Shop, command, temporary_storage};

/// The served document of all routes.
pub static DOCUMENT: LazyLock<Value> =
    LazyLock::new(|| serde_json::to_value(stampede_http::openapi::document()).unwrap());

/// One method of one path.
pub struct Route {
    pub method: Method,
    pub path: String,
    pub operation: &'static Value,
}

pub static ROUTES: LazyLock<Vec<Route>> = LazyLock::new(|| {
    let mut routes = Vec::new();
    for (path, item) in DOCUMENT["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let method = method.to_uppercase().parse().unwrap();
            routes.push(Route { method, path: path.clone(), operation });
        }
    }
    routes
});

/// The schemas of the bodies, by their reference. Responses must not have members that are not in the document.
static SCHEMAS: LazyLock<HashMap<String, Validator>> = LazyLock::new(|| {
    let mut components = DOCUMENT["components"].clone();
    for schema in components["schemas"].as_object_mut().unwrap().values_mut() {
        let schema = schema.as_object_mut().unwrap();
        if schema.get("type") == Some(&json!("object")) {
            schema.insert("additionalProperties".to_owned(), json!(false));
        }
    }
    let mut schemas = HashMap::new();
    for route in ROUTES.iter() {
        for response in route.operation["responses"].as_object().unwrap().values() {
            for content in response["content"].as_object().unwrap_or(&Map::new()).values() {
                let mut whole = content["schema"].clone();
                whole["components"] = components.clone();
                let made = || jsonschema::options().should_validate_formats(true).build(&whole).unwrap();
                schemas.entry(content["schema"].to_string()).or_insert_with(made);
            }
        }
    }
    schemas
});

fn matches_template(template: &str, path: &str) -> bool {
    let (mut template, mut path) = (template.split('/'), path.split('/'));
    loop {
        match (template.next(), path.next()) {
            (None, None) => return true,
            (Some(expected), Some(found)) if expected == found || (expected == "{id}" && !found.is_empty()) => {}
            _ => return false,
        }
    }
}

/// HTML pages are not in the document.
fn is_html_page(path: &str) -> bool {
    path == "/" || path.starts_with("/assets/") || path.starts_with("/docs") || path == "/openapi.json"
}

/// Panics if the document does not allow the reply.
pub fn judge(exchange: &Exchange<'_>) {
    if let Err(wrong) = verdict(exchange) {
        let Exchange { method, path, reply } = exchange;
        panic!("{wrong}: {method} {path}: {} {:?} {:?}", reply.status, reply.header("content-type"), reply.body);
    }
}

fn verdict(exchange: &Exchange<'_>) -> Result<(), String> {
    let Exchange { method, path, reply } = exchange;
    if is_html_page(path) || *method == Method::OPTIONS {
        return Ok(());
    }
    let of_path: Vec<&Route> = ROUTES.iter().filter(|route| matches_template(&route.path, path)).collect();
    // A separate listener returns 404 for the routes of the other one.
    if of_path.is_empty() || (reply.status == StatusCode::NOT_FOUND && reply.text("code") == "not_found") {
        return problem(reply, StatusCode::NOT_FOUND);
    }
    let asked = if *method == Method::HEAD { &Method::GET } else { method };
    let Some(route) = of_path.iter().find(|route| route.method == *asked) else {
        return problem(reply, StatusCode::METHOD_NOT_ALLOWED);
    };
    let response = &route.operation["responses"][reply.status.as_str()];
    if !response.is_object() {
        return Err("the document knows no such status here".to_owned());
    }
    if *method == Method::HEAD || response["content"].is_null() {
        return if reply.body.is_empty() { Ok(()) } else { Err("the document knows no body here".to_owned()) };
    }
    let kind = reply.header("content-type").split(';').next().unwrap_or_default();
    let schema = &response["content"][kind]["schema"];
    if !schema.is_object() {
        return Err(format!("the document knows no {kind:?} here"));
    }
    let body = if kind.ends_with("json") { reply.json() } else { json!(String::from_utf8_lossy(&reply.body)) };
    if let Some(error) = SCHEMAS[&schema.to_string()].iter_errors(&body).next() {
        return Err(format!("{error} at {}", error.instance_path()));
    }
    if kind == "application/problem+json" { problem(reply, reply.status) } else { Ok(()) }
}

fn problem(reply: &Reply, status: StatusCode) -> Result<(), String> {
    let good = reply.status == status
        && reply.header("content-type") == "application/problem+json"
        && reply.json()["status"] == json!(status.as_u16());
    if good { Ok(()) } else { Err(format!("not a problem with the status {status}")) }
}

#[test]
fn openapi_document_matches_the_snapshot() {
    // A change of the API changes this snapshot: review it, then accept it with INSTA_UPDATE=always.
    insta::assert_snapshot!(serde_json::to_string_pretty(&*DOCUMENT).unwrap());
}

#[test]
fn reply_that_violates_the_document_is_detected() {
    let reply = |status: u16, kind: &'static str, body: &'static str| {
        let mut headers = hyper::HeaderMap::new();
        headers.insert("content-type", hyper::header::HeaderValue::from_static(kind));
        let status = StatusCode::from_u16(status).unwrap();
        Reply { status, headers, body: bytes::Bytes::from_static(body.as_bytes()) }
    };
    let good = r#"{"shop_types":[{"id":"1","name":"x"}]}"#;
    let of = |reply: &Reply| verdict(&Exchange { method: &Method::GET, path: "/v1/shop-types", reply });
    assert_eq!(of(&reply(200, "application/json", good)), Ok(()));
    for bad in [
        reply(201, "application/json", good),
        reply(200, "text/plain", good),
        reply(200, "application/json", r#"{"shop_types":[{"id":1,"name":"x"}]}"#),
        reply(200, "application/json", r#"{"shop_types":[{"id":"1"}]}"#),
        reply(200, "application/json", r#"{"shop_types":[],"more":1}"#),
        reply(429, "application/problem+json", r#"{"type":"urn:stampede:x","title":"x","status":429,"code":"x"}"#),
    ] {
        assert!(of(&bad).is_err(), "{bad:?}");
    }
}

/// `docs/api.md` has every code with its status, and those that refuse buying also in the table of buying.
#[test]
fn api_documentation_has_every_code() {
    let text = include_str!("../../../../docs/api.md");
    let section = |title: &str| text.split("\n## ").find(|section| section.starts_with(title)).unwrap();
    let has_row = |section: &str, code: &Code| {
        let (status, word) = (code.http_status().to_string(), format!("`{}`", code.as_str()));
        section
            .lines()
            .any(|line| line.split('|').nth(1).is_some_and(|first| first.contains(&status)) && line.contains(&word))
    };
    for code in Code::ALL {
        assert!(has_row(section("Refusals"), code), "{code:?} is not in the table of refusals");
        let refuses_buying = code.refuses_buying() && *code != Code::Internal;
        assert!(!refuses_buying || has_row(section("Buying"), code), "{code:?} is not in the table of buying");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_listener_documents_its_own_routes() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.args(["--admin-listen", "127.0.0.1:0"]);
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let served = client.get("/openapi.json", "").await.unwrap().json();
    let paths: Vec<&String> = served["paths"].as_object().unwrap().keys().collect();
    assert!(paths.iter().any(|path| path.starts_with("/v1/")), "{paths:?}");
    assert!(!paths.iter().any(|path| path.starts_with("/admin")), "{paths:?}");
    for path in paths {
        assert_eq!(served["paths"][path], DOCUMENT["paths"][path]);
    }
    let page = client.get("/docs/", "").await.unwrap();
    assert_eq!((page.status.as_u16(), page.header("content-type")), (200, "text/html; charset=utf-8"));
    assert!(page.header("content-security-policy").contains("script-src 'self'"));
}
