//! Not selling more than there is: the stock in one row of the database.
//!
//! In order: [`no_check`], [`row_lock`], [`version_column`], [`stock_as_version`], [`not_negative`], [`above_zero`].

pub mod above_zero;
pub mod no_check;
pub mod not_negative;
pub mod row_lock;
pub mod stock_as_version;
pub mod version_column;

use crate::version::Version;

pub const VERSIONS: &[&Version] = &[
    &no_check::VERSION,
    &row_lock::VERSION,
    &version_column::VERSION,
    &stock_as_version::VERSION,
    &not_negative::VERSION,
    &above_zero::VERSION,
];
