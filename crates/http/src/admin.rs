//! What administrators do to sales, and the record of all they do. Every change is on record before it is made.

use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use stampede_core::ids::NotAnId;
use stampede_core::ports::AuditEntry;
use stampede_core::{NewSale, SaleId, SaleStatus, Timestamp};
use stampede_engine::{Error, SaleView};

use crate::app::App;
use crate::extract::{Id, Json, Operator, Params, Viewer, to_the_end};
use crate::problem::Problem;
use crate::sales::{SaleAnswer, page_size};

pub(crate) type Created<T> = (StatusCode, Answer<T>);

pub(crate) fn created<T>(made: T) -> Created<T> {
    (StatusCode::CREATED, Answer(made))
}

/// Does an operator's work to the end, on record.
pub(crate) async fn audited<T, W>(
    app: Arc<App>,
    operator: Operator,
    action: &'static str,
    target: String,
    work: impl FnOnce(Arc<App>) -> W + Send + 'static,
) -> Result<T, Problem>
where
    T: Send + 'static,
    W: Future<Output = Result<T, Error>> + Send,
{
    let doing = async move { app.engine.audited(&operator.0, action, &target, work(app.clone())).await };
    to_the_end(doing).await
}

/// A sale with what only administrators see.
#[derive(Serialize)]
pub(crate) struct AdminSaleAnswer {
    #[serde(flatten)]
    sale: SaleAnswer,
    status: SaleStatus,
    ver: i64,
}

impl AdminSaleAnswer {
    fn new(view: &SaleView) -> Self {
        Self { sale: SaleAnswer::new(view, None), status: view.sale.status, ver: view.sale.ver }
    }
}

pub(crate) async fn create_sale(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(new): Json<NewSale>,
) -> Result<Created<AdminSaleAnswer>, Problem> {
    let target = format!("voucher {}: {} from {} to {}", new.voucher_id, new.stock, new.begin, new.end);
    let work = move |app: Arc<App>| async move { app.engine.create_sale(new).await };
    let view = audited(app, operator, "create_sale", target, work).await?;
    Ok(created(AdminSaleAnswer::new(&view)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListParams {
    before: Option<SaleId>,
    limit: Option<u32>,
}

#[derive(Serialize)]
pub(crate) struct ListAnswer {
    sales: Vec<AdminSaleAnswer>,
}

pub(crate) async fn list_sales(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<ListParams>,
) -> Result<Answer<ListAnswer>, Problem> {
    let views = app.engine.all_sales(params.before, page_size(params.limit)? as usize);
    Ok(Answer(ListAnswer { sales: views.iter().map(AdminSaleAnswer::new).collect() }))
}

pub(crate) async fn one_sale(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    Ok(Answer(AdminSaleAnswer::new(&app.engine.any_sale(id)?)))
}

async fn set_status(
    app: Arc<App>,
    operator: Operator,
    action: &'static str,
    id: SaleId,
    status: SaleStatus,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    let work = move |app: Arc<App>| async move { app.engine.set_sale_status(id, status).await };
    let view = audited(app, operator, action, format!("sale {id}"), work).await?;
    Ok(Answer(AdminSaleAnswer::new(&view)))
}

pub(crate) async fn pause(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    set_status(app, operator, "pause", id, SaleStatus::Paused).await
}

/// Also publishes a draft.
pub(crate) async fn resume(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    set_status(app, operator, "resume", id, SaleStatus::OnSale).await
}

pub(crate) async fn end(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    set_status(app, operator, "end", id, SaleStatus::Ended).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TopUp {
    add: u32,
    /// Names this request: sent again, it adds nothing.
    request_id: String,
}

pub(crate) async fn top_up(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
    Json(top_up): Json<TopUp>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    let good = (1..=64).contains(&top_up.request_id.len()) && top_up.request_id.bytes().all(|b| b.is_ascii_graphic());
    if !good {
        return Err(Problem::invalid("request_id", "must have 1 to 64 visible ASCII characters"));
    }
    let target = format!("sale {id}: {} more, request {}", top_up.add, top_up.request_id);
    let work = move |app: Arc<App>| async move { app.engine.top_up(id, top_up.add, &top_up.request_id).await };
    let view = audited(app, operator, "top_up", target, work).await?;
    Ok(Answer(AdminSaleAnswer::new(&view)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AuditParams {
    before: Option<AuditId>,
    limit: Option<u32>,
}

/// The id of an entry, as text like every id.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct AuditId(i64);

impl TryFrom<String> for AuditId {
    type Error = NotAnId;

    fn try_from(text: String) -> Result<Self, NotAnId> {
        text.parse().ok().filter(|id| *id > 0).map(Self).ok_or(NotAnId)
    }
}

#[derive(Serialize)]
pub(crate) struct AuditAnswer {
    id: String,
    at: Timestamp,
    actor: String,
    action: String,
    target: String,
    outcome: String,
}

#[derive(Serialize)]
pub(crate) struct AuditLogAnswer {
    entries: Vec<AuditAnswer>,
}

pub(crate) async fn audit(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<AuditParams>,
) -> Result<Answer<AuditLogAnswer>, Problem> {
    let limit = page_size(params.limit)?;
    let entries = app.engine.audit_log(params.before.map(|id| id.0), limit).await?;
    let answer = |entry: AuditEntry| {
        let AuditEntry { id, at, actor, action, target, outcome } = entry;
        AuditAnswer { id: id.to_string(), at, actor, action, target, outcome }
    };
    Ok(Answer(AuditLogAnswer { entries: entries.into_iter().map(answer).collect() }))
}
