//! Redeeming paid orders: the owner shows a code, and the shop hands out what was bought.

use rand::RngExt as _;
use stampede_core::ports::TransitionOutcome;
use stampede_core::{Code, Order, OrderId, OrderStatus, UserId};
use subtle::ConstantTimeEq as _;

use crate::audit::Outcome;
use crate::engine::Engine;
use crate::error::Error;
use crate::orders::step_taken;

/// The characters of codes: without those that are mistaken for others.
const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
/// 40 bits. A code can be tried a few times only.
const LENGTH: usize = 8;

fn new_code() -> String {
    let mut rng = rand::rng();
    (0..LENGTH).map(|_| char::from(ALPHABET[rng.random_range(0..ALPHABET.len())])).collect()
}

/// A code as it was typed: in either case, with separators, and with letters for similar digits.
fn normalize(typed: &str) -> String {
    let one = |c: char| match c.to_ascii_uppercase() {
        'O' => '0',
        'I' | 'L' => '1',
        other => other,
    };
    typed.chars().filter(|c| !c.is_whitespace() && *c != '-').take(LENGTH + 1).map(one).collect()
}

impl Engine {
    /// The code with which the user's own paid order is redeemed. One that was tried too often is replaced.
    pub async fn redeem_code(&self, id: OrderId, user: UserId) -> Result<String, Error> {
        self.own_order(id, user).await?.ok_or(Error::Plain(Code::NoSuchOrder))?;
        let code = self.stores.ledger.redeem_code(id, &new_code()).await?;
        code.ok_or(Error::Plain(Code::IllegalStep))
    }

    /// Redeems a paid order with its code, once. The attempt is counted before the code is compared.
    pub async fn redeem(&self, id: OrderId, code: &str) -> Result<Outcome<Order>, Error> {
        self.paid_order(id).await?;
        let Some(expected) = self.stores.ledger.try_redeem_code(id).await? else {
            // It may have been redeemed in between.
            self.paid_order(id).await?;
            return Err(Error::Plain(Code::WrongCode));
        };
        if !bool::from(expected.as_bytes().ct_eq(normalize(code).as_bytes())) {
            return Err(Error::Plain(Code::WrongCode));
        }
        match self.stores.ledger.redeem(id, self.clock.now()).await? {
            TransitionOutcome::Done(order) => Ok(step_taken(order, OrderStatus::Paid)),
            TransitionOutcome::Repeated(order) => Ok(Outcome::unchanged(order)),
            TransitionOutcome::NoSuchOrder => Err(Error::Plain(Code::NoSuchOrder)),
            TransitionOutcome::Illegal(_) => Err(Error::Plain(Code::IllegalStep)),
        }
    }

    async fn paid_order(&self, id: OrderId) -> Result<(), Error> {
        let order = self.stores.ledger.order(id).await?.ok_or(Error::Plain(Code::NoSuchOrder))?;
        if order.status == OrderStatus::Paid { Ok(()) } else { Err(Error::Plain(Code::IllegalStep)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_read_as_people_type_them() {
        let code = new_code();
        assert_eq!(code.len(), LENGTH);
        assert_eq!(normalize(&code), code);
        assert_eq!(normalize(&code.to_lowercase()), code);
        assert_eq!(normalize(&format!(" {}-{} ", &code[..4], &code[4..])), code);
        assert_eq!(normalize("oIl0-1aBc"), "01101ABC");
        assert_ne!(normalize(&format!("{code}0")), code, "longer");
        assert_ne!(new_code(), code);
    }
}
