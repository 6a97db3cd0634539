//! The format of a message. All numbers are big-endian.
//!
//! | bytes | batch | marker of a rebuild | marker of a comparison |
//! |---|---|---|---|
//! | 1 | version, 1 | version, 1 | version, 1 |
//! | 1 | kind, 1 | kind, 2 | kind, 3 |
//! | 8 | sale | incarnation | id |
//! | 8 | epoch | | |
//! | 4 | number of orders, 1 to [`MAX_ORDERS`] | | |
//! | 32 for each order | order, user, seq, at (milliseconds since 1970): 8 bytes each | | |
//!
//! Nothing may follow. A change of the format gets a new version. Consumers must understand it before publishers use it.

use stampede_core::ports::Admitted;
use stampede_core::{Epoch, OrderId, SaleId, Timestamp, UserId};

use crate::error::QueueError;
use crate::{Batch, Marker, Payload};

/// The highest number of orders in a message. Longer ones are not decoded, so that a broken message cannot take all memory.
pub const MAX_ORDERS: usize = 16_384;

const VERSION: u8 = 1;
const BATCH: u8 = 1;
const REBUILD: u8 = 2;
const RECONCILE: u8 = 3;
const BATCH_HEAD: usize = 1 + 1 + 8 + 8 + 4;
const ORDER: usize = 4 * 8;

/// Why bytes are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A version that this program does not know.
    #[error("version {0} is unknown")]
    Version(u8),
    /// A kind that the version does not have.
    #[error("kind {0} is unknown")]
    Kind(u8),
    /// Shorter or longer than its content says.
    #[error("the length does not match the content")]
    Length,
    /// No orders, or too many.
    #[error("{0} orders in a message")]
    OrderCount(u32),
    /// Not a positive number.
    #[error("an id is not a positive number")]
    Id,
    /// Beyond the numbers that the ledger has for incarnations.
    #[error("an incarnation is out of range")]
    Incarnation,
}

/// # Errors
/// [`QueueError::InvalidSize`] if the batch is empty or too large.
pub fn encode_batch(batch: &Batch) -> Result<Vec<u8>, QueueError> {
    let invalid = || QueueError::InvalidSize(batch.orders.len());
    if batch.orders.is_empty() || batch.orders.len() > MAX_ORDERS {
        return Err(invalid());
    }
    let count = u32::try_from(batch.orders.len()).map_err(|_| invalid())?;
    let mut bytes = Vec::with_capacity(BATCH_HEAD + ORDER * batch.orders.len());
    bytes.extend([VERSION, BATCH]);
    bytes.extend(batch.sale.get().to_be_bytes());
    bytes.extend(batch.epoch.0.to_be_bytes());
    bytes.extend(count.to_be_bytes());
    for order in &batch.orders {
        for number in [order.order.get(), order.user.get(), order.seq, order.at.ms()] {
            bytes.extend(number.to_be_bytes());
        }
    }
    Ok(bytes)
}

/// The bytes of a marker.
pub fn encode_marker(marker: Marker) -> Vec<u8> {
    let (kind, number) = match marker {
        Marker::Rebuild { incarnation } => (REBUILD, incarnation),
        Marker::Reconcile { id } => (RECONCILE, id),
    };
    let mut bytes = vec![VERSION, kind];
    bytes.extend(number.to_be_bytes());
    bytes
}

/// Decodes a message; bytes that are not one become [`Payload::Undecodable`].
pub fn decode(bytes: Vec<u8>) -> Payload {
    match try_decode(&bytes) {
        Ok(payload) => payload,
        Err(error) => Payload::Undecodable { bytes, error },
    }
}

fn try_decode(bytes: &[u8]) -> Result<Payload, DecodeError> {
    let mut rest = bytes;
    let version = take::<1>(&mut rest)?[0];
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    let payload = match take::<1>(&mut rest)?[0] {
        BATCH => Payload::Batch(decode_batch(&mut rest)?),
        REBUILD => {
            let incarnation = u64::try_from(number(&mut rest)?).map_err(|_| DecodeError::Incarnation)?;
            Payload::Marker(Marker::Rebuild { incarnation })
        }
        RECONCILE => Payload::Marker(Marker::Reconcile { id: u64::from_be_bytes(take(&mut rest)?) }),
        kind => return Err(DecodeError::Kind(kind)),
    };
    if rest.is_empty() { Ok(payload) } else { Err(DecodeError::Length) }
}

fn decode_batch(rest: &mut &[u8]) -> Result<Batch, DecodeError> {
    let sale = SaleId::new(number(rest)?).map_err(|_| DecodeError::Id)?;
    let epoch = Epoch(number(rest)?);
    let count = u32::from_be_bytes(take(rest)?);
    let length = usize::try_from(count).map_err(|_| DecodeError::OrderCount(count))?;
    if length == 0 || length > MAX_ORDERS {
        return Err(DecodeError::OrderCount(count));
    }
    // Before memory is allocated for them.
    if rest.len() != length * ORDER {
        return Err(DecodeError::Length);
    }
    let mut orders = Vec::with_capacity(length);
    for _ in 0..length {
        orders.push(Admitted {
            order: OrderId::new(number(rest)?).map_err(|_| DecodeError::Id)?,
            user: UserId::new(number(rest)?).map_err(|_| DecodeError::Id)?,
            seq: number(rest)?,
            at: Timestamp::from_ms(number(rest)?),
        });
    }
    Ok(Batch { sale, epoch, orders })
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], DecodeError> {
    let (taken, left) = rest.split_first_chunk::<N>().ok_or(DecodeError::Length)?;
    *rest = left;
    Ok(*taken)
}

fn number(rest: &mut &[u8]) -> Result<i64, DecodeError> {
    take(rest).map(i64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn batches() -> impl Strategy<Value = Batch> {
        let id = || 1..=i64::MAX;
        let order = (id(), id(), any::<i64>(), any::<i64>()).prop_map(|(order, user, seq, at)| Admitted {
            order: OrderId::new(order).unwrap(),
            user: UserId::new(user).unwrap(),
            seq,
            at: Timestamp::from_ms(at),
        });
        (id(), any::<i64>(), vec(order, 1..50)).prop_map(|(sale, epoch, orders)| Batch {
            sale: SaleId::new(sale).unwrap(),
            epoch: Epoch(epoch),
            orders,
        })
    }

    proptest! {
        #[test]
        fn batch_is_decoded_as_it_was_encoded(batch in batches()) {
            let bytes = encode_batch(&batch).unwrap();
            prop_assert_eq!(bytes.len(), BATCH_HEAD + ORDER * batch.orders.len());
            prop_assert_eq!(decode(bytes), Payload::Batch(batch));
        }

        #[test]
        fn marker_is_decoded_as_it_was_encoded(number: u64) {
            for marker in [Marker::Rebuild { incarnation: number >> 1 }, Marker::Reconcile { id: number }] {
                prop_assert_eq!(decode(encode_marker(marker)), Payload::Marker(marker));
            }
        }

        #[test]
        fn random_bytes_do_not_panic(bytes in vec(any::<u8>(), 0..200)) {
            if let Payload::Undecodable { bytes: kept, .. } = decode(bytes.clone()) {
                prop_assert_eq!(kept, bytes);
            }
        }

        /// Bytes that begin like a message reach the checks behind the head.
        #[test]
        fn random_content_does_not_panic(kind in 1..=3_u8, bytes in vec(any::<u8>(), 0..200)) {
            decode([&[VERSION, kind], &bytes[..]].concat());
        }

        #[test]
        fn every_other_length_is_refused(batch in batches(), cut in any::<prop::sample::Index>(), extra in vec(any::<u8>(), 1..40)) {
            let bytes = encode_batch(&batch).unwrap();
            let short = bytes[..cut.index(bytes.len())].to_vec();
            let refused = matches!(decode(short), Payload::Undecodable { error: DecodeError::Length, .. });
            prop_assert!(refused);
            let long = [bytes, extra].concat();
            let refused = matches!(decode(long), Payload::Undecodable { error: DecodeError::Length, .. });
            prop_assert!(refused);
        }
    }

    /// The format is part of what a broker stores, so it must not change by accident.
    #[test]
    fn format_is_the_documented_one() {
        let order = Admitted {
            order: OrderId::new(i64::MAX).unwrap(),
            user: UserId::new(3).unwrap(),
            seq: 4,
            at: Timestamp::from_ms(5),
        };
        let batch = Batch { sale: SaleId::new(1).unwrap(), epoch: Epoch(2), orders: vec![order] };
        let expected = [
            &[1, 1][..],
            &[0, 0, 0, 0, 0, 0, 0, 1],
            &[0, 0, 0, 0, 0, 0, 0, 2],
            &[0, 0, 0, 1],
            &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            &[0, 0, 0, 0, 0, 0, 0, 3],
            &[0, 0, 0, 0, 0, 0, 0, 4],
            &[0, 0, 0, 0, 0, 0, 0, 5],
        ]
        .concat();
        assert_eq!(encode_batch(&batch).unwrap(), expected);
        assert_eq!(encode_marker(Marker::Rebuild { incarnation: 7 }), [1, 2, 0, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!(encode_marker(Marker::Reconcile { id: 7 }), [1, 3, 0, 0, 0, 0, 0, 0, 0, 7]);
    }

    #[test]
    fn incarnations_beyond_those_of_the_ledger_are_refused() {
        let largest = u64::MAX >> 1;
        let marker = |incarnation| Marker::Rebuild { incarnation };
        assert_eq!(decode(encode_marker(marker(largest))), Payload::Marker(marker(largest)));
        for incarnation in [largest + 1, u64::MAX] {
            let decoded = decode(encode_marker(marker(incarnation)));
            assert!(matches!(decoded, Payload::Undecodable { error: DecodeError::Incarnation, .. }), "{decoded:?}");
        }
    }

    #[test]
    fn sizes_are_bounded() {
        let order = Admitted {
            order: OrderId::new(1).unwrap(),
            user: UserId::new(1).unwrap(),
            seq: 1,
            at: Timestamp::from_ms(1),
        };
        let batch = |orders| Batch { sale: SaleId::new(1).unwrap(), epoch: Epoch(1), orders: vec![order; orders] };
        for orders in [0, MAX_ORDERS + 1] {
            assert_eq!(encode_batch(&batch(orders)), Err(QueueError::InvalidSize(orders)));
        }
        let mut bytes = encode_batch(&batch(MAX_ORDERS)).unwrap();
        assert!(matches!(decode(bytes.clone()), Payload::Batch(_)));
        let error = |bytes: Vec<u8>| match decode(bytes) {
            Payload::Undecodable { error, .. } => error,
            decoded => panic!("{decoded:?}"),
        };
        let (count, most) = (2 + 8 + 8, u32::try_from(MAX_ORDERS).unwrap());
        for (orders, expected) in [
            (0, DecodeError::OrderCount(0)),
            (u32::MAX, DecodeError::OrderCount(u32::MAX)),
            (most + 1, DecodeError::OrderCount(most + 1)),
            (most - 1, DecodeError::Length),
        ] {
            bytes[count..count + 4].copy_from_slice(&orders.to_be_bytes());
            assert_eq!(error(bytes.clone()), expected);
        }
        let mut no_id = encode_batch(&batch(1)).unwrap();
        no_id[2..10].fill(0);
        assert_eq!(error(no_id), DecodeError::Id);
        assert_eq!(error(vec![2, 1]), DecodeError::Version(2));
        assert_eq!(error(vec![1, 9]), DecodeError::Kind(9));
        assert_eq!(error(Vec::new()), DecodeError::Length);
    }
}
