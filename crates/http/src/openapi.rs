//! The routes, and the OpenAPI document made from them: served at `/openapi.json`, to be read at `/docs`.
//!
//! A handler tells its path, its answers and its own refusals; what holds for many routes is added in `complete`.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::middleware::{from_extractor_with_state, map_response};
use axum::response::Response;
use axum::routing::get;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, ContentBuilder, InfoBuilder, OpenApi, Ref, RefOr, Required, ResponseBuilder};
use utoipa::{PartialSchema as _, ToSchema as _};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter, UtoipaMethodRouterExt as _};
use utoipa_axum::routes;
use utoipa_swagger_ui::{Config as SwaggerConfig, SwaggerUi};

use crate::app::{App, Surface};
use crate::extract::Prober;
use crate::figures::TimedLayer;
use crate::problem;
use crate::{admin, audit, load_test, login, marks, operations, orders, quarantine, sales, shops, users};

/// Every route of a listener.
pub(crate) fn collect(surface: Surface, load_test: bool) -> OpenApiRouter<Arc<App>> {
    let mut all = vec![routes!(operations::healthz), routes!(operations::readyz)];
    if surface != Surface::Admin {
        all.extend([
            routes!(login::send_code),
            routes!(login::puzzle),
            routes!(login::log_in),
            routes!(login::log_out),
            routes!(login::sessions, login::end_sessions),
            routes!(login::end_session),
            routes!(login::me),
            routes!(shops::types),
            routes!(shops::list),
            routes!(shops::one),
            routes!(shops::vouchers),
            routes!(sales::list),
            routes!(sales::one),
            routes!(orders::buy),
            routes!(orders::list),
            routes!(orders::one),
            routes!(orders::cancel),
        ]);
    }
    if surface != Surface::Buyers {
        all.extend([
            routes!(operations::metrics),
            routes!(audit::log),
            routes!(users::find),
            routes!(users::one),
            routes!(users::end_sessions),
            routes!(users::disable),
            routes!(users::enable),
            routes!(shops::create),
            routes!(shops::edit),
            routes!(shops::all_vouchers),
            routes!(shops::create_voucher),
            routes!(shops::edit_voucher),
            routes!(shops::shelve),
            routes!(shops::unshelve),
            routes!(admin::list_sales, admin::create_sale),
            routes!(admin::one_sale),
            routes!(admin::gate),
            routes!(marks::marks),
            routes!(admin::orders_in),
            routes!(admin::pause),
            routes!(admin::resume),
            routes!(admin::end),
            routes!(admin::top_up),
            routes!(quarantine::list),
            routes!(quarantine::one),
            routes!(quarantine::retry),
            routes!(quarantine::discard),
        ]);
    }
    if load_test {
        all.push(routes!(load_test::noop));
        if surface != Surface::Buyers {
            all.push(routes!(load_test::sessions));
        }
    }
    all.into_iter().fold(OpenApiRouter::new(), |router, route| router.routes(timed(route)))
}

/// Every route has its own figure of how long it takes.
fn timed(route: UtoipaMethodRouter<Arc<App>>) -> UtoipaMethodRouter<Arc<App>> {
    let path = route.1.paths.keys().next().cloned().unwrap_or_default();
    route.layer(TimedLayer::new(path))
}

/// The document of all routes there are.
pub fn document() -> OpenApi {
    complete(collect(Surface::Both, true).into_openapi())
}

/// Adds what holds for many routes: who may ask, the id in the path, and the refusals that any handler can end in.
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

/// Is it a path for administrators alone?
pub(crate) fn is_for_administrators(path: &str) -> bool {
    path.starts_with("/admin/") || path == "/metrics"
}

fn complete_operation(path: &str, operation: &mut Operation, changes: bool) {
    let is_admins = is_for_administrators(path);
    let mut refusals = vec![
        ("400", "`invalid_request`"),
        ("500", "`internal`"),
        ("503", "`busy`, `unavailable` or `outcome_unknown`: ask again"),
    ];
    if path.contains("{id}") {
        refusals.push(("404", "There is no such thing, or it is not yours"));
        if !operation
            .parameters
            .iter()
            .flatten()
            .any(|parameter| matches!(parameter, RefOr::T(one) if one.name == "id"))
        {
            let id = ParameterBuilder::new()
                .name("id")
                .parameter_in(ParameterIn::Path)
                .required(Required::True)
                .schema(Some(stampede_core::OrderId::schema()))
                .build();
            operation.parameters.get_or_insert_default().push(RefOr::T(id));
        }
    }
    if operation.request_body.is_some() {
        refusals[0].1 = "`invalid_request`, `invalid_json`";
        refusals.extend([
            ("408", "`request_timeout`"),
            ("413", "`payload_too_large`"),
            ("415", "`unsupported_media_type`"),
        ]);
    }
    if is_admins {
        operation.security = Some(vec![SecurityRequirement::new("admin", [""; 0])]);
        refusals.push(("429", "`too_many_requests`: too many wrong tokens from this address"));
        if changes {
            refusals.push(("403", "`forbidden`: a viewer changes nothing"));
        }
    } else if path.starts_with("/v1/") || path == "/readyz" {
        refusals.push(("429", "`too_many_requests`"));
    }
    if operation.security.is_some() {
        refusals.push(("401", "`unauthorized`"));
    }
    let responses = &mut operation.responses.responses;
    for (status, description) in refusals {
        let response = || RefOr::T(ResponseBuilder::new().description(description).build());
        responses.entry(status.to_owned()).or_insert_with(response);
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

/// `/openapi.json` and `/docs`.
pub(crate) fn pages(api: &OpenApi, app: Arc<App>) -> Router<Arc<App>> {
    // The page styles itself inline; scripts are its own files alone.
    let policy = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
                  connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    // Written once: it is the same for every caller, and longer than anything else that is served. Plain maps and strings: writing
    // them cannot fail.
    let document = Bytes::from(serde_json::to_vec(api).unwrap_or_default());
    let document = move || async move { ([(CONTENT_TYPE, "application/json")], document) };
    let pages: Router<Arc<App>> = SwaggerUi::new("/docs").config(SwaggerConfig::from("/openapi.json")).into();
    let pages = pages.route("/openapi.json", get(document)).layer(from_extractor_with_state::<Prober, _>(app));
    pages.layer(map_response(async move |mut response: Response| {
        let headers = response.headers_mut();
        headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
        if let Some(kind) = headers.get_mut(CONTENT_TYPE).filter(|kind| lacks_charset(kind))
            && let Ok(whole) = HeaderValue::try_from([kind.as_bytes(), b"; charset=utf-8"].concat())
        {
            *kind = whole;
        }
        response
    }))
}

fn lacks_charset(kind: &HeaderValue) -> bool {
    kind.to_str().is_ok_and(|kind| kind.starts_with("text/") && !kind.contains("charset"))
}
