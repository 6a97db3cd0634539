//! Shops by a part of their name.
//!
//! `shop_gram` holds the pieces of one, two and three characters of every name. A search takes the rarest piece of what it looks
//! for, reads the shops that have it, newest first, and keeps those whose name has the whole. It is an ordinary table with an
//! ordinary index, so it is the same on every database: SQLite's and PostgreSQL's own indexes start at three characters, which is
//! more than most Chinese words have, and MariaDB has none.
//!
//! One search looks at no more than [`CANDIDATES`] shops, whatever it looks for; its page says where to go on.

use std::collections::BTreeSet;

use stampede_core::ports::{Result, ShopFilter, ShopPage};
use stampede_core::{Shop, ShopId};

use super::Store;
use super::catalogue::{SHOPS, read_shop};
use crate::db::{Arg, Tx, args};

/// How many shops one search looks at.
const CANDIDATES: u32 = 1000;
/// How many pieces of what is looked for are compared for the rarest.
const PIECES: usize = 6;
const LONGEST: usize = 3;

/// The text as it is compared: in lower case, character by character.
pub(super) fn fold(text: &str) -> String {
    text.chars().flat_map(char::to_lowercase).collect()
}

/// All different pieces of so many characters.
fn pieces(folded: &str, length: usize) -> BTreeSet<String> {
    let letters: Vec<char> = folded.chars().collect();
    letters.windows(length).map(|piece| piece.iter().collect()).collect()
}

fn all_pieces(folded: &str) -> Vec<String> {
    (1..=LONGEST).flat_map(|length| pieces(folded, length)).collect()
}

/// A part of a text, for LIKE with `ESCAPE '!'`: what means something to LIKE means only itself.
fn pattern(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len() + 8);
    pattern.push('%');
    for letter in text.chars() {
        if matches!(letter, '%' | '_' | '!') {
            pattern.push('!');
        }
        pattern.push(letter);
    }
    pattern.push('%');
    pattern
}

/// Writes the pieces of a shop's name.
pub(super) async fn insert_pieces(tx: &mut Tx, shop: &Shop) -> Result<()> {
    let pieces = all_pieces(&fold(&shop.name));
    let rows = vec!["(?, ?)"; pieces.len()].join(", ");
    let values: Vec<Arg<'_>> = pieces.iter().flat_map(|piece| [piece.as_str().into(), shop.id.get().into()]).collect();
    tx.execute(&format!("INSERT INTO shop_gram (gram, shop_id) VALUES {rows}"), &values).await?;
    Ok(())
}

/// Removes the pieces of the name that a shop had.
pub(super) async fn delete_pieces(tx: &mut Tx, shop: &Shop) -> Result<()> {
    let pieces = all_pieces(&fold(&shop.name));
    let list = vec!["?"; pieces.len()].join(", ");
    let mut values: Vec<Arg<'_>> = vec![shop.id.get().into()];
    values.extend(pieces.iter().map(|piece| Arg::from(piece.as_str())));
    tx.execute(&format!("DELETE FROM shop_gram WHERE shop_id = ? AND gram IN ({list})"), &values).await?;
    Ok(())
}

impl Store {
    /// The shops whose name has `name` in it, newest first.
    pub(super) async fn search_shops(&self, filter: &ShopFilter, name: &str) -> Result<ShopPage> {
        let folded = fold(name);
        let before = filter.before.map_or(i64::MAX, ShopId::get);
        let Some(piece) = self.rarest_piece(&folded, before).await? else { return Ok(ShopPage::default()) };
        let pattern = pattern(&folded);
        let mut values = args![piece.as_str(), before, CANDIDATES, pattern.as_str()].to_vec();
        let mut sql = format!(
            "{SHOPS} id IN (SELECT shop_id FROM (SELECT shop_id FROM shop_gram WHERE gram = ? AND shop_id < ? \
             ORDER BY shop_id DESC LIMIT ?) AS candidate) AND folded_name LIKE ? ESCAPE '!'"
        );
        if let Some(type_id) = filter.type_id {
            sql.push_str(" AND type_id = ?");
            values.push(type_id.get().into());
        }
        sql.push_str(" ORDER BY id DESC LIMIT ?");
        values.push(filter.limit.into());
        let shops = self.db.rows(&sql, &values).await?.iter().map(read_shop).collect::<Result<Vec<_>>>()?;
        if shops.len() == filter.limit as usize {
            return Ok(ShopPage { next: shops.last().map(|shop| shop.id), shops });
        }
        // Where the candidates ended, if there may be more.
        let last =
            "SELECT shop_id FROM shop_gram WHERE gram = ? AND shop_id < ? ORDER BY shop_id DESC LIMIT 1 OFFSET ?";
        let last = self.db.row(last, args![piece.as_str(), before, CANDIDATES - 1]).await?;
        let next = last.map(|row| row.int(0)).transpose()?.and_then(|id| ShopId::new(id).ok());
        Ok(ShopPage { shops, next })
    }

    /// The piece that the fewest shops have, of some that are spread over the text. `None` if there is one that no shop has.
    async fn rarest_piece(&self, folded: &str, before: i64) -> Result<Option<String>> {
        let all = pieces(folded, folded.chars().count().clamp(1, LONGEST));
        let step = all.len().div_ceil(PIECES).max(1);
        let mut some: Vec<String> = all.into_iter().step_by(step).collect();
        let count =
            "(SELECT COUNT(*) FROM (SELECT 1 AS one FROM shop_gram WHERE gram = ? AND shop_id < ? LIMIT ?) AS counted)";
        let sql = format!("SELECT {}", vec![count; some.len()].join(", "));
        let values = some.iter().flat_map(|piece| [piece.as_str().into(), before.into(), CANDIDATES.into()]);
        let Some(row) = self.db.row(&sql, &values.collect::<Vec<Arg<'_>>>()).await? else { return Ok(None) };
        let mut rarest = (i64::MAX, 0);
        for place in 0..some.len() {
            rarest = rarest.min((row.int(place)?, place));
        }
        Ok((rarest.0 > 0).then(|| some.swap_remove(rarest.1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_falls_into_all_its_pieces() {
        let expected = ["a", "é", "茶", "aé", "é茶", "aé茶"];
        let mut found = all_pieces(&fold("AÉ茶"));
        found.sort_by_key(|piece| (piece.chars().count(), piece.clone()));
        assert_eq!(found, expected);
        assert_eq!(all_pieces("aaaa"), ["a", "aa", "aaa"]);
        assert_eq!(all_pieces("a"), ["a"]);
        assert_eq!(pattern("a%_!"), "%a!%!_!!%");
    }
}
