//! End to end: the built binary, real sockets, a real database, killed by its pid.
//!
//! - `shop`, `history`: a running server with buyers in it, and what they heard against what the ledger holds
//! - `contract`: every reply that any test gets is held against the OpenAPI document; `fuzz`: hostile requests made from it
//! - `storm`: the crowd; `crash`: the crowd and `kill -9`; `chaos`: both, for as long as you like
//! - `nodes`: two processes on one database; `outage`: the database dies, is cut off, is slow; the disk is full
//! - `quarantine`: orders that the database rejects, and what an operator does with them
//! - `proof`: bench, and that planted bugs are caught; `check`: the check, and that it is neither blind nor wrong
//! - `durability`: nothing is promised before it is on the disk
//! - `administration`: roles, the audit log, trusted proxies, figures; `credentials`: tokens and certificates, SIGHUP, what is logged of refusals
//! - `attack`: one address takes all the connections it can; `costly`: it sends what costs most; honest requests are served all the same
//! - `edge`: TLS, other origins, slow senders; `hostile`: bad input; `commands`: flags, settings, first screen, shutdown; `people`: limits and orders;
//!   `webhook`: credentials of the address that login codes are posted to; `dependencies`: `make deps`
//! - `login`: codes, challenges, budgets; `login_attack`: a guesser for minutes; `sessions`: sessions and accounts

#![expect(clippy::cast_possible_truncation, reason = "counts of a test are small")]

mod administration;
mod attack;
mod buyers;
mod chaos;
mod check;
mod commands;
mod contract;
mod costly;
mod crash;
mod credentials;
mod dependencies;
mod durability;
mod edge;
mod fuzz;
mod history;
mod hostile;
mod login;
mod login_attack;
mod nodes;
mod outage;
mod proof;
mod quarantine;
mod sessions;
mod shop;
mod storm;
mod webhook;
