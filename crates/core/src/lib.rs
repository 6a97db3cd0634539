//! The words everything else speaks. No I/O and no runtime in here, so that all of it can be tested and simulated.
//!
//! - [`sale`]: a sale, its window, its status, and what they mean for a buyer who comes now
//! - [`admission`]: what the gate answers
//! - [`order`]: an order and the only steps it may take
//! - [`shop`], [`user`]: what is sold, and to whom
//! - [`ids`]: typed ids, and the snowflake maker that never repeats one
//! - [`money`], [`clock`]: cents and milliseconds
//! - [`error`]: the stable codes that clients see
//! - [`ports`]: what the ledger must be able to do
//! - [`failpoint`]: places where a test can stop or pause the process

pub mod admission;
pub mod clock;
pub mod error;
pub mod failpoint;
pub mod ids;
pub mod money;
pub mod order;
pub mod ports;
pub mod sale;
pub mod shop;
pub mod user;

pub use admission::{Admission, Refusal, mark_digest};
pub use clock::{Clock, SystemClock, Timestamp};
pub use error::{Code, Invalid};
pub use ids::{Epoch, OrderId, SaleId, ShopId, ShopTypeId, UserId, VoucherId};
pub use money::Money;
pub use order::{Order, OrderStatus, RejectReason};
pub use sale::{Sale, SaleState, SaleStatus, Window};
pub use shop::{NewSale, NewShop, NewVoucher, Shop, ShopType, Voucher, VoucherKind};
pub use user::{LONG_CODES_AFTER, Phone, User};
