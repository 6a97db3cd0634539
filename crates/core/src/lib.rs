//! The domain types that all other crates share. No I/O and no runtime, so that everything can be tested without either.
//!
//! - [`sale`]: a sale, its window, its status, and what they mean for a request to buy
//! - [`admission`]: the gate's answers
//! - [`order`]: an order and its legal transitions; [`payment`]: payments that a provider has reported, and their return
//! - [`shop`]: shops and vouchers; [`user`]: users
//! - [`ids`]: typed ids, and the id generator, which never repeats an id
//! - [`money`], [`clock`]: cents and milliseconds
//! - [`error`]: the stable codes that clients see
//! - [`ports`]: the interfaces of gate, ledger, catalogue and accounts
//! - `words`: a macro for enumerations whose values are words; [`failpoint`]: places where a test can stop or pause the process

pub mod admission;
pub mod clock;
pub mod error;
pub mod failpoint;
pub mod ids;
pub mod money;
pub mod order;
pub mod payment;
pub mod ports;
pub mod sale;
pub mod shop;
pub mod user;
mod words;

pub use admission::{Admission, Refusal, mark_digest};
pub use clock::{Clock, SystemClock, Timestamp};
pub use error::{Code, Invalid};
pub use ids::{Epoch, OrderId, SaleId, ShopId, ShopTypeId, UserId, VoucherId};
pub use money::Money;
pub use order::{Actor, Order, OrderEvent, OrderStatus, RejectReason, StepReason};
pub use payment::{Payment, PaymentStatus, RefundAttempt, RefundReason, ReportedPayment};
pub use sale::{Sale, SalePhase, SaleState, SaleStatus, Window, WindowChange, WindowFault};
pub use shop::{NewSale, NewShop, NewVoucher, Shop, ShopType, Voucher, VoucherKind};
pub use user::{LONG_CODES_AFTER, Phone, User};
