//! The OpenAPI document, made from the handlers: served at `/openapi.json`, with a page to read it at `/docs`.
//!
//! A handler declares its path, its responses and the refusals that only it has; `complete` adds what holds for many routes.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::middleware::{from_extractor_with_state, map_response};
use axum::response::Response;
use axum::routing::{MethodRouter, get};
use stampede_core::Code;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, ContentBuilder, InfoBuilder, OpenApi, Ref, RefOr, Required, ResponseBuilder};
use utoipa::{PartialSchema as _, ToSchema as _};
use utoipa_swagger_ui::{Config as SwaggerConfig, SwaggerUi};

use crate::app::App;
use crate::extract::Prober;
use crate::router::is_admin_path;
use crate::{buy, problem, router};

/// The document of all routes.
pub fn document() -> OpenApi {
    complete(router::declared())
}

/// Adds what holds for many routes: authentication, the id in the path, and the refusals that they have in common.
pub(crate) fn complete(mut api: OpenApi) -> OpenApi {
    api.info = InfoBuilder::new()
        .title("Stampede")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "A flash-sale engine. Ids are strings. Every refusal is a problem (RFC 9457) with a stable `code`.",
        ))
        .build();
    let components = api.components.get_or_insert_with(Components::default);
    for (name, description) in [("buyer", "The token of a login"), ("admin", "The token of an administrator")] {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(description)).build();
        components.add_security_scheme(name, SecurityScheme::Http(scheme));
    }
    let mut schemas = vec![(problem::Document::name().into_owned(), problem::Document::schema())];
    problem::Document::schemas(&mut schemas);
    components.schemas.extend(schemas);
    for (path, item) in &mut api.paths.paths {
        let operations =
            [(&mut item.get, false), (&mut item.post, true), (&mut item.put, true), (&mut item.delete, true)];
        for (operation, changes) in operations {
            if let Some(operation) = operation {
                complete_operation(path, operation, changes);
            }
        }
    }
    api
}

fn complete_operation(path: &str, operation: &mut Operation, changes: bool) {
    if path.contains("{id}") && !has_id(operation) {
        let id = ParameterBuilder::new()
            .name("id")
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .schema(Some(stampede_core::OrderId::schema()))
            .build();
        operation.parameters.get_or_insert_default().push(RefOr::T(id));
    }
    if is_admin_path(path) {
        operation.security = Some(vec![SecurityRequirement::new("admin", [""; 0])]);
    }
    let refusals = refusals(path, operation, changes);
    let responses = &mut operation.responses.responses;
    for (status, description) in refusals {
        let response = || RefOr::T(ResponseBuilder::new().description(description).build());
        responses.entry(status.to_string()).or_insert_with(response);
    }
    let is_refusal = |status: &str| status.starts_with(['4', '5']);
    for (_, response) in responses.iter_mut().filter(|(status, _)| is_refusal(status)) {
        if let RefOr::T(response) = response {
            let schema = Ref::from_schema_name(problem::Document::name());
            let content = ContentBuilder::new().schema(Some(schema)).build();
            response.content.insert("application/problem+json".to_owned(), RefOr::T(content));
        }
    }
}

fn has_id(operation: &Operation) -> bool {
    operation.parameters.iter().flatten().any(|parameter| matches!(parameter, RefOr::T(one) if one.name == "id"))
}

/// The refusals that a route has in common with others, as descriptions by status.
fn refusals(path: &str, operation: &Operation, changes: bool) -> BTreeMap<u16, String> {
    let with_status = |status: u16| Code::ALL.iter().copied().filter(move |code| code.http_status() == status);
    let mut codes: Vec<Code> = vec![Code::InvalidRequest, Code::Internal];
    codes.extend(with_status(503));
    if path == buy::PATH {
        codes.extend(Code::ALL.iter().filter(|code| code.refuses_buying()));
    }
    if operation.request_body.is_some() {
        codes.extend([Code::InvalidJson, Code::RequestTimeout, Code::PayloadTooLarge, Code::UnsupportedMediaType]);
    }
    if operation.security.is_some() {
        codes.push(Code::Unauthorized);
    }
    if path.starts_with("/v1/") || path == "/readyz" {
        codes.push(Code::TooManyRequests);
    }
    let mut by_status: BTreeMap<u16, Vec<Code>> = BTreeMap::new();
    for code in codes {
        let same_status = by_status.entry(code.http_status()).or_default();
        if !same_status.contains(&code) {
            same_status.push(code);
        }
    }
    let mut refusals: BTreeMap<u16, String> =
        by_status.into_iter().map(|(status, codes)| (status, describe(&codes))).collect();
    let mut note = |code: Code, note: &str| {
        refusals.entry(code.http_status()).or_insert_with(|| format!("{note}: {}", describe(&[code])));
    };
    if is_admin_path(path) {
        note(Code::TooManyRequests, "Too many wrong tokens from this address");
        if changes {
            note(Code::Forbidden, "A viewer may not change anything");
        }
    }
    if path.contains("{id}") {
        refusals.entry(404).or_insert_with(|| "No such resource, or it belongs to another user".to_owned());
    }
    refusals
}

/// `` `a`, `b` or `c` ``, and whether the client should retry.
fn describe(codes: &[Code]) -> String {
    let mut words: Vec<_> = codes.iter().map(|code| format!("`{}`", code.as_str())).collect();
    let last = words.pop().unwrap_or_default();
    let words = if words.is_empty() { last } else { format!("{} or {last}", words.join(", ")) };
    let retry = if codes.iter().all(|code| code.is_retryable()) { "; retry after `Retry-After` seconds" } else { "" };
    format!("{words}{retry}")
}

/// A route that returns the document. It is serialized once: it is the same for every caller, and longer than any other response.
fn document_route<S: Clone + Send + Sync + 'static>(api: &OpenApi) -> MethodRouter<S> {
    // Serializing plain maps and strings does not fail.
    let document = Bytes::from(serde_json::to_vec(api).unwrap_or_default());
    get(move || async move { ([(CONTENT_TYPE, "application/json")], document) })
}

/// The routes `/openapi.json` and `/docs`.
pub(crate) fn pages(api: &OpenApi, app: Arc<App>) -> Router<Arc<App>> {
    // The page has inline styles; its scripts are files.
    let policy = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
                  connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let pages: Router<Arc<App>> = SwaggerUi::new("/docs").config(SwaggerConfig::from("/openapi.json")).into();
    let pages = pages.route("/openapi.json", document_route(api)).layer(from_extractor_with_state::<Prober, _>(app));
    pages.layer(map_response(async move |mut response: Response| {
        let headers = response.headers_mut();
        headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
        if let Some(kind) = headers.get_mut(CONTENT_TYPE).filter(|kind| lacks_charset(kind))
            && let Ok(with_charset) = HeaderValue::try_from([kind.as_bytes(), b"; charset=utf-8"].concat())
        {
            *kind = with_charset;
        }
        response
    }))
}

fn lacks_charset(kind: &HeaderValue) -> bool {
    kind.to_str().is_ok_and(|kind| kind.starts_with("text/") && !kind.contains("charset"))
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use tower::ServiceExt as _;

    use super::*;

    #[tokio::test]
    async fn document_is_serialized_once_for_all_responses() {
        let router: Router = Router::new().route("/openapi.json", document_route(&document()));
        let mut bodies = Vec::new();
        for _ in 0..2 {
            let request = Request::get("/openapi.json").body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            bodies.push(to_bytes(response.into_body(), usize::MAX).await.unwrap());
        }
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&bodies[0]).unwrap()["info"]["title"], "Stampede");
        // Both exist, so they have the same address only if they share the bytes.
        assert_eq!(bodies[0].as_ptr(), bodies[1].as_ptr());
    }

    /// Handlers name the codes of their own refusals in texts, which the compiler does not check.
    #[test]
    fn every_code_in_a_description_has_the_status_of_its_response() {
        let document = document();
        let mut checked = 0;
        for (path, item) in &document.paths.paths {
            for operation in [&item.get, &item.post, &item.put, &item.delete].into_iter().flatten() {
                for (status, response) in &operation.responses.responses {
                    let RefOr::T(response) = response else { continue };
                    if !status.starts_with(['4', '5']) {
                        continue;
                    }
                    let words = response.description.split('`').skip(1).step_by(2);
                    for word in words.filter(|word| word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')) {
                        let code = Code::ALL.iter().find(|code| code.as_str() == word);
                        let expected = code.map(|code| code.http_status().to_string());
                        assert_eq!(expected.as_ref(), Some(status), "{path}: {word}");
                        checked += 1;
                    }
                }
            }
        }
        assert!(checked > 100, "{checked}");
    }

    #[test]
    fn refusals_of_buying_come_from_the_table() {
        let document = document();
        let post = document.paths.paths[buy::PATH].post.as_ref().unwrap();
        for code in Code::ALL.iter().filter(|code| code.refuses_buying()) {
            let RefOr::T(response) = &post.responses.responses[&code.http_status().to_string()] else { panic!() };
            assert!(response.description.contains(&format!("`{}`", code.as_str())), "{code:?}");
        }
    }
}
