//! How many login codes may be sent: to a phone, for an address and its network, and by the whole shop.
//!
//! One address may use at most half of what a phone may have, so that it cannot keep the phone's owner from getting a code. A
//! code that a login has used does not count against the phone's day: its owner asked for it.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use metrics::{Counter, counter};
use parking_lot::Mutex;
use stampede_core::Phone;
use stampede_limit::{Check, Counters, Limit, Limiter, check_all, network, rate_limit_key, undo_all};

use crate::token::TokenSigner;

#[derive(Debug, Clone, Copy)]
pub struct SendBudgets {
    pub per_phone: Limit,
    /// Codes that no login has used.
    pub per_phone_day: Limit,
    /// Per IPv4 address, and per network of 64 bits of IPv6.
    pub per_address: Limit,
    pub per_ipv6_56: Limit,
    pub per_ipv6_48: Limit,
    pub per_shop: Limit,
    /// How many phones and addresses each budget remembers.
    pub memory: usize,
}

impl SendBudgets {
    /// The same limit for every budget.
    pub const fn uniform(limit: Limit, memory: usize) -> Self {
        Self {
            per_phone: limit,
            per_phone_day: limit,
            per_address: limit,
            per_ipv6_56: limit,
            per_ipv6_48: limit,
            per_shop: limit,
            memory,
        }
    }
}

/// The network that shares of a phone's budget are counted by. A subscriber with IPv6 usually has many networks of 64 bits, which must not
/// each have a share of their own.
fn share_network(address: IpAddr) -> IpAddr {
    network(address, 48)
}

/// Stands for a phone in the keys of counters, which are visible to everyone who may read Redis.
type PhoneName = [u8; 16];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Phone(PhoneName),
    /// What one address, or one network of 48 bits of IPv6, uses of a phone's budget.
    Share(PhoneName, IpAddr),
    Network(IpAddr),
    Shop,
}

/// The name of the key in Redis.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phone(phone) => write!(f, "{:032x}", u128::from_be_bytes(*phone)),
            Self::Share(phone, network) => write!(f, "{:032x}/{network}", u128::from_be_bytes(*phone)),
            Self::Network(network) => network.fmt(f),
            Self::Shop => f.write_str("shop"),
        }
    }
}

/// Writes a log line at most this often for each budget.
const LOG_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Budget {
    name: &'static str,
    count: u32,
    used: Limiter<Key>,
    spent: Counter,
    /// When it was last logged, and how often it has refused since.
    logged: Mutex<(Option<Instant>, u64)>,
}

impl Budget {
    fn new(counters: &Counters, name: &'static str, limit: Limit, memory: usize) -> Self {
        let spent = counter!("stampede_send_budget_spent_total", "budget" => name);
        // The series is there from the start, so that an alert on it can be written before it is needed.
        spent.increment(0);
        let used = Limiter::new(counters, &format!("codes_per_{name}"), limit, memory);
        Self { name, count: limit.count, used, spent, logged: Mutex::default() }
    }

    fn check(&self, key: Key) -> Check<'_, Key> {
        let maximum = if matches!(key, Key::Share(..)) { (self.count / 2).max(1) } else { self.count };
        Check { limiter: &self.used, key, maximum }
    }

    fn refused(&self, key: &Key, phone: &Phone, address: IpAddr) {
        self.spent.increment(1);
        let refused = {
            let mut logged = self.logged.lock();
            logged.1 += 1;
            if logged.0.is_some_and(|at| at.elapsed() < LOG_EVERY) {
                return;
            }
            std::mem::replace(&mut *logged, (Some(Instant::now()), 0)).1
        };
        let share = matches!(key, Key::Share(..));
        tracing::warn!(budget = self.name, share, %phone, %address, refused, "a send budget is spent");
    }
}

#[derive(Debug)]
pub(crate) struct SendLimiter {
    signer: TokenSigner,
    phone: Budget,
    phone_day: Budget,
    address: Budget,
    ipv6_56: Budget,
    ipv6_48: Budget,
    shop: Budget,
}

impl SendLimiter {
    /// The counters have names for phones, made with `signer`: all nodes need the same key.
    pub(crate) fn new(config: SendBudgets, counters: &Counters, signer: TokenSigner) -> Self {
        // A phone counts as a whole and by the shares of its addresses.
        let budget = |name, limit| Budget::new(counters, name, limit, config.memory);
        Self {
            signer,
            phone: budget("phone", config.per_phone),
            phone_day: budget("phone_day", config.per_phone_day),
            address: budget("address", config.per_address),
            ipv6_56: budget("ipv6_56", config.per_ipv6_56),
            ipv6_48: budget("ipv6_48", config.per_ipv6_48),
            shop: budget("shop", config.per_shop),
        }
    }

    /// Every budget that a code to this phone for this address counts against. A share precedes the budget that it is a part of.
    fn budgets(&self, phone: &Phone, address: IpAddr) -> Vec<(&Budget, Key)> {
        let [whole, share] = self.phone_keys(phone, address);
        let mut budgets = vec![
            (&self.phone, share),
            (&self.phone, whole),
            (&self.phone_day, share),
            (&self.phone_day, whole),
            (&self.address, Key::Network(rate_limit_key(address))),
        ];
        if address.to_canonical().is_ipv6() {
            budgets.push((&self.ipv6_56, Key::Network(network(address, 56))));
            budgets.push((&self.ipv6_48, Key::Network(network(address, 48))));
        }
        budgets.push((&self.shop, Key::Shop));
        budgets
    }

    /// The keys of the phone, and of the share of an address.
    fn phone_keys(&self, phone: &Phone, address: IpAddr) -> [Key; 2] {
        let name = self.signer.phone_name(phone);
        [Key::Phone(name), Key::Share(name, share_network(address))]
    }

    fn checks(&self, phone: &Phone, address: IpAddr) -> Vec<Check<'_, Key>> {
        self.budgets(phone, address).into_iter().map(|(budget, key)| budget.check(key)).collect()
    }

    /// Counts one code against every budget, or against none: then how long to wait.
    pub(crate) async fn take(&self, phone: &Phone, address: IpAddr) -> Result<(), Duration> {
        check_all(&self.checks(phone, address)).await.map_err(|refused| {
            let (budget, key) = &self.budgets(phone, address)[refused.place];
            budget.refused(key, phone, address);
            refused.wait
        })
    }

    /// The code was not sent after all.
    pub(crate) fn undo(&self, phone: &Phone, address: IpAddr) {
        undo_all(&self.checks(phone, address));
    }

    /// A login has used a code that was requested from this address.
    pub(crate) fn used(&self, phone: &Phone, address: IpAddr) {
        undo_all(&self.phone_keys(phone, address).map(|key| self.phone_day.check(key)));
    }

    /// For the limit of each budget, how many codes it has let through without counting them, because its memory was full.
    pub(crate) fn let_through(&self) -> [(&'static str, u64); 6] {
        [
            ("codes_per_phone", &self.phone),
            ("codes_per_phone_day", &self.phone_day),
            ("codes_per_address", &self.address),
            ("codes_per_ipv6_56", &self.ipv6_56),
            ("codes_per_ipv6_48", &self.ipv6_48),
            ("codes_per_shop", &self.shop),
        ]
        .map(|(limit, budget)| (limit, budget.used.let_through()))
    }

    /// How many codes were counted by this process alone, because Redis did not answer.
    pub(crate) fn fallbacks(&self) -> u64 {
        // Every code counts against the budget of the shop.
        self.shop.used.fallbacks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    const MANY: Limit = Limit { count: 1000, window: Duration::from_secs(3600) };
    const CONFIG: SendBudgets = SendBudgets::uniform(MANY, 1000);

    fn few(count: u32) -> Limit {
        Limit { count, ..MANY }
    }

    fn phone(n: u32) -> Phone {
        Phone::parse(&format!("138{n:08}")).unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// How many of `tries` codes are granted, each to the phone and for the address that `of` says.
    fn granted(limiter: &SendLimiter, tries: u32, of: impl Fn(u32) -> (Phone, IpAddr)) -> usize {
        (0..tries)
            .filter(|&n| {
                let (phone, address) = of(n);
                take(limiter, &phone, address).is_ok()
            })
            .count()
    }

    /// With counters in this process there is nothing to wait for.
    fn take(limiter: &SendLimiter, phone: &Phone, address: IpAddr) -> Result<(), Duration> {
        limiter.take(phone, address).now_or_never().expect("ready at once")
    }

    fn with(config: SendBudgets) -> SendLimiter {
        SendLimiter::new(config, &Counters::Local, TokenSigner::new(&[7; 32], None))
    }

    #[test]
    fn one_address_uses_at_most_half_of_a_phones_budget() {
        for config in [SendBudgets { per_phone: few(10), ..CONFIG }, SendBudgets { per_phone_day: few(10), ..CONFIG }] {
            let limiter = with(config);
            assert_eq!(granted(&limiter, 50, |_| (phone(1), ip("192.0.2.1"))), 5);
            // All networks of one /48 have one share.
            let in_one_48 = |n| (phone(1), ip(&format!("2001:db8:0:{n:x}::1")));
            assert_eq!(granted(&limiter, 50, in_one_48), 5, "the other half");
            assert_eq!(granted(&limiter, 50, |_| (phone(1), ip("192.0.2.2"))), 0, "the phone has had enough");
            assert_eq!(granted(&limiter, 1, |_| (phone(2), ip("192.0.2.1"))), 1, "another phone");
        }
    }

    #[test]
    fn addresses_networks_and_the_shop_have_budgets() {
        let to_many = |address: &'static str| move |n| (phone(n), ip(address));
        let limiter = with(SendBudgets { per_address: few(3), ..CONFIG });
        assert_eq!(granted(&limiter, 9, to_many("192.0.2.1")), 3);
        assert_eq!(granted(&limiter, 9, to_many("192.0.2.2")), 3, "each IPv4 address has its own");
        assert_eq!(granted(&limiter, 9, |n| (phone(n), ip(&format!("2001:db8::{n:x}")))), 3, "a /64 is one");

        let each_64 = |n| (phone(n), ip(&format!("2001:db8:0:{n:x}::1")));
        let limiter = with(SendBudgets { per_address: few(3), per_ipv6_56: few(5), ..CONFIG });
        assert_eq!(granted(&limiter, 20, each_64), 5);
        let each_56 = |n| (phone(n), ip(&format!("2001:db8:0:{:x}::1", n << 8)));
        let limiter = with(SendBudgets { per_ipv6_56: few(5), per_ipv6_48: few(7), ..CONFIG });
        assert_eq!(granted(&limiter, 20, each_56), 7);
        let limiter = with(SendBudgets { per_shop: few(9), ..CONFIG });
        assert_eq!(granted(&limiter, 20, |n| (phone(n), ip(&format!("192.0.2.{n}")))), 9);
    }

    #[test]
    fn codes_that_a_budget_has_no_memory_for_are_counted_by_budget() {
        let limiter = with(SendBudgets::uniform(MANY, 1));
        assert_eq!(granted(&limiter, 200, |n| (phone(n), ip("192.0.2.1"))), 200);
        let let_through: std::collections::HashMap<_, _> = limiter.let_through().into();
        assert!(let_through["codes_per_phone"] > 0 && let_through["codes_per_phone_day"] > 0, "{let_through:?}");
        for one_key in ["codes_per_address", "codes_per_ipv6_56", "codes_per_ipv6_48", "codes_per_shop"] {
            assert_eq!(let_through[one_key], 0, "{let_through:?}");
        }
    }

    #[test]
    fn refused_code_counts_against_no_budget_and_used_code_not_against_the_daily_one() {
        let limiter = with(SendBudgets { per_shop: few(1), per_phone_day: few(4), ..CONFIG });
        let (owner, home) = (phone(1), ip("192.0.2.1"));
        take(&limiter, &owner, home).unwrap();
        for _ in 0..10 {
            take(&limiter, &owner, home).unwrap_err();
        }
        limiter.undo(&owner, home);
        assert_eq!(granted(&limiter, 9, |_| (owner.clone(), home)), 1, "the shop's one; the phone's are still there");

        let limiter = with(SendBudgets { per_phone_day: few(4), ..CONFIG });
        for _ in 0..10 {
            take(&limiter, &owner, home).unwrap();
            limiter.used(&owner, home);
        }
        assert_eq!(granted(&limiter, 9, |_| (owner.clone(), home)), 2, "codes that no login has used");
    }
}
