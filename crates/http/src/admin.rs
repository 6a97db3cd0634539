//! What administrators do to sales. Every change is in the audit log before it is made.

use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stampede_core::ports::OrderRow;
use stampede_core::{NewSale, Order, OrderId, OrderStatus, SaleId, SaleStatus, Timestamp, UserId};
use stampede_engine::{Action, Error, Outcome};
use utoipa::{IntoParams, ToSchema};

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
    action: Action,
    work: impl FnOnce(Arc<App>) -> W + Send + 'static,
) -> Result<T, Problem>
where
    T: Send + 'static,
    W: Future<Output = Result<Outcome<T>, Error>> + Send,
{
    let doing = async move { app.engine.audited(&operator.0, action, work(app.clone())).await };
    to_the_end(doing).await
}

/// Makes a sale of a voucher.
#[utoipa::path(post, path = "/admin/v1/sales", tag = "admin", request_body = NewSale, responses((status = 201, description = "Made", body = SaleAnswer), (status = 404, description = "`no_such_voucher`"), (status = 409, description = "`sale_exists`, or `illegal_step` if the voucher is none for flash sales")))]
pub(crate) async fn create_sale(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(new): Json<NewSale>,
) -> Result<Created<SaleAnswer>, Problem> {
    let action = Action::new("create_sale", format!("voucher {}", new.voucher_id)).with_request(json!(new));
    let work = move |app: Arc<App>| async move {
        let view = app.engine.create_sale(new).await?;
        let sale = view.sale.clone();
        Ok(Outcome::made(view, sale.as_ref()))
    };
    let view = audited(app, operator, action, work).await?;
    Ok(created(SaleAnswer::whole(&view)))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllSalesParams {
    before: Option<SaleId>,
    /// How many on a page; 20 without it.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct AllSalesAnswer {
    sales: Vec<SaleAnswer>,
}

/// All sales, newest first.
#[utoipa::path(get, path = "/admin/v1/sales", tag = "admin", params(AllSalesParams), responses((status = 200, description = "A page", body = AllSalesAnswer)))]
pub(crate) async fn list_sales(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<AllSalesParams>,
) -> Result<Answer<AllSalesAnswer>, Problem> {
    let views = app.engine.all_sales(params.before, page_size(params.limit)? as usize);
    Ok(Answer(AllSalesAnswer { sales: views.iter().map(SaleAnswer::whole).collect() }))
}

/// One sale.
#[utoipa::path(get, path = "/admin/v1/sales/{id}", tag = "admin", responses((status = 200, description = "The sale", body = SaleAnswer)))]
pub(crate) async fn one_sale(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
) -> Result<Answer<SaleAnswer>, Problem> {
    Ok(Answer(SaleAnswer::whole(&app.engine.any_sale(id)?)))
}

async fn set_status(
    app: Arc<App>,
    operator: Operator,
    name: &'static str,
    id: SaleId,
    status: SaleStatus,
) -> Result<Answer<SaleAnswer>, Problem> {
    let work = move |app: Arc<App>| async move { app.engine.set_sale_status(id, status).await };
    let view = audited(app, operator, Action::new(name, format!("sale {id}")), work).await?;
    Ok(Answer(SaleAnswer::whole(&view)))
}

/// What the gate holds of a sale.
#[derive(Serialize, ToSchema)]
pub(crate) struct GateAnswer {
    ver: i64,
    cap: u32,
    marks: u32,
    /// Marks whose orders the ledger has.
    settled: u32,
    /// Over all marks: 16 hexadecimal digits, equal for equal sets of people and orders.
    digest: String,
    /// Admitted orders of all sales that wait for the ledger.
    waiting: usize,
}

/// What the gate holds of a sale now, to be compared with the ledger.
#[utoipa::path(get, path = "/admin/v1/sales/{id}/gate", tag = "admin", responses((status = 200, description = "At one moment", body = GateAnswer)))]
pub(crate) async fn gate(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
) -> Result<Answer<GateAnswer>, Problem> {
    let (gate, digest) = app.engine.gate_snapshot(id).await?;
    let (ver, cap, marks, settled) = (gate.ver, gate.cap, gate.marks, gate.settled);
    Ok(Answer(GateAnswer { ver, cap, marks, settled, digest: format!("{digest:016x}"), waiting: app.engine.waiting() }))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct OrdersInParams {
    after: Option<OrderId>,
    /// How many on a page; 100 without it.
    #[param(minimum = 1, maximum = 10_000)]
    limit: Option<u32>,
}

/// An order as the ledger keeps it.
#[derive(Serialize, ToSchema)]
pub(crate) struct OrderRowAnswer {
    id: OrderId,
    user_id: UserId,
    status: OrderStatus,
    live: bool,
    epoch: i64,
    seq: i64,
    price_cents: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct OrdersInAnswer {
    orders: Vec<OrderRowAnswer>,
    /// Ask for the orders `after` this one to go on; null at the end.
    next: Option<OrderId>,
}

/// The orders of a sale in the order of their ids, dead ones too.
#[utoipa::path(get, path = "/admin/v1/sales/{id}/orders", tag = "admin", params(OrdersInParams), responses((status = 200, description = "A page", body = OrdersInAnswer)))]
pub(crate) async fn orders_in(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
    Params(params): Params<OrdersInParams>,
) -> Result<Answer<OrdersInAnswer>, Problem> {
    let limit = params.limit.unwrap_or(100);
    if !(1..=10_000).contains(&limit) {
        return Err(Problem::invalid("limit", "must be between 1 and 10000"));
    }
    let rows = app.engine.orders_in(id, params.after, limit).await?;
    let next = rows.last().filter(|_| rows.len() == limit as usize).map(|row| row.order.id);
    let answer = |row: OrderRow| {
        let OrderRow { order, live, epoch, seq } = row;
        let Order { id, user, status, price, created_at, updated_at, .. } = order;
        let (epoch, price_cents) = (epoch.0, price.cents());
        OrderRowAnswer { id, user_id: user, status, live, epoch, seq, price_cents, created_at, updated_at }
    };
    Ok(Answer(OrdersInAnswer { orders: rows.into_iter().map(answer).collect(), next }))
}

/// Stops selling for now.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/pause", tag = "admin", responses((status = 200, description = "Paused", body = SaleAnswer), (status = 409, description = "`illegal_step`")))]
pub(crate) async fn pause(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
) -> Result<Answer<SaleAnswer>, Problem> {
    set_status(app, operator, "pause", id, SaleStatus::Paused).await
}

/// Sells on; also publishes a draft.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/resume", tag = "admin", responses((status = 200, description = "On sale", body = SaleAnswer), (status = 409, description = "`illegal_step`")))]
pub(crate) async fn resume(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
) -> Result<Answer<SaleAnswer>, Problem> {
    set_status(app, operator, "resume", id, SaleStatus::OnSale).await
}

/// Ends a sale for good.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/end", tag = "admin", responses((status = 200, description = "Ended", body = SaleAnswer), (status = 409, description = "`illegal_step`")))]
pub(crate) async fn end(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
) -> Result<Answer<SaleAnswer>, Problem> {
    set_status(app, operator, "end", id, SaleStatus::Ended).await
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TopUp {
    #[schema(minimum = 1, maximum = 10_000_000)]
    add: u32,
    /// Names this request: sent again, it adds nothing.
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]*$")]
    request_id: String,
}

/// Adds to the stock. Sent again with the same request id, it adds nothing.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/top-ups", tag = "admin", request_body = TopUp, responses((status = 200, description = "Added", body = SaleAnswer), (status = 409, description = "`illegal_step` or `request_id_reused`")))]
pub(crate) async fn top_up(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
    Json(top_up): Json<TopUp>,
) -> Result<Answer<SaleAnswer>, Problem> {
    let good = (1..=64).contains(&top_up.request_id.len()) && top_up.request_id.bytes().all(|b| b.is_ascii_graphic());
    if !good {
        return Err(Problem::invalid("request_id", "must have 1 to 64 visible ASCII characters"));
    }
    let action = Action::new("top_up", format!("sale {id}")).with_request(json!(top_up));
    let work = move |app: Arc<App>| async move { app.engine.top_up(id, top_up.add, &top_up.request_id).await };
    let view = audited(app, operator, action, work).await?;
    Ok(Answer(SaleAnswer::whole(&view)))
}
