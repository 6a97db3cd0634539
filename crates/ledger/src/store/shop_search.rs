//! Search for shops by a part of their name.
//!
//! `shop_gram` contains the n-grams of one, two and three characters of every name. A search takes the rarest n-gram of the search text, reads
//! the shops that have it, newest first, and keeps those whose name contains the whole text. It is an ordinary table with an ordinary index,
//! so it works on every database: the trigram indexes of SQLite and PostgreSQL need three characters, which is more than most Chinese words
//! have, and MariaDB has none.
//!
//! One search reads at most [`CANDIDATES`] shops; its page contains where to continue.

use std::collections::BTreeSet;

use stampede_core::ports::{Result, ShopFilter, ShopPage};
use stampede_core::{Shop, ShopId};

use super::Store;
use super::catalogue::SHOPS;
use crate::db::{Arg, Tx, args};

/// The maximum number of shops that one search reads.
const CANDIDATES: u32 = 1000;
/// The number of n-grams among which the rarest is chosen.
const MAX_NGRAMS: usize = 6;
const MAX_NGRAM_CHARS: usize = 3;

/// The text in lower case, as it is compared.
pub(super) fn fold(text: &str) -> String {
    text.chars().flat_map(char::to_lowercase).collect()
}

/// All distinct n-grams of this length.
fn ngrams(folded: &str, length: usize) -> BTreeSet<String> {
    let letters: Vec<char> = folded.chars().collect();
    letters.windows(length).map(|ngram| ngram.iter().collect()).collect()
}

fn all_ngrams(folded: &str) -> Vec<String> {
    (1..=MAX_NGRAM_CHARS).flat_map(|length| ngrams(folded, length)).collect()
}

/// A LIKE pattern for a part of a text, with special characters escaped for `ESCAPE '!'`.
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

/// Inserts the n-grams of a shop's name.
pub(super) async fn insert_ngrams(tx: &mut Tx, shop: &Shop) -> Result<()> {
    let ngrams = all_ngrams(&fold(&shop.name));
    let rows = vec!["(?, ?)"; ngrams.len()].join(", ");
    let values: Vec<Arg<'_>> = ngrams.iter().flat_map(|ngram| [ngram.as_str().into(), shop.id.get().into()]).collect();
    tx.execute(&format!("INSERT INTO shop_gram (gram, shop_id) VALUES {rows}"), &values).await?;
    Ok(())
}

/// Deletes the n-grams of a shop's old name.
pub(super) async fn delete_ngrams(tx: &mut Tx, shop: &Shop) -> Result<()> {
    let ngrams = all_ngrams(&fold(&shop.name));
    let list = vec!["?"; ngrams.len()].join(", ");
    let mut values: Vec<Arg<'_>> = vec![shop.id.get().into()];
    values.extend(ngrams.iter().map(|ngram| Arg::from(ngram.as_str())));
    tx.execute(&format!("DELETE FROM shop_gram WHERE shop_id = ? AND gram IN ({list})"), &values).await?;
    Ok(())
}

impl Store {
    /// The shops whose name contains `name`, newest first.
    pub(super) async fn search_shops(&self, filter: &ShopFilter, name: &str) -> Result<ShopPage> {
        let folded = fold(name);
        let before = filter.before.map_or(i64::MAX, ShopId::get);
        let Some(ngram) = self.rarest_ngram(&folded, before).await? else { return Ok(ShopPage::default()) };
        let pattern = pattern(&folded);
        let values = args![ngram.as_str(), before, CANDIDATES, pattern.as_str()].to_vec();
        let sql = format!(
            "{SHOPS} id IN (SELECT shop_id FROM (SELECT shop_id FROM shop_gram WHERE gram = ? AND shop_id < ? \
             ORDER BY shop_id DESC LIMIT ?) AS candidate) AND folded_name LIKE ? ESCAPE '!'"
        );
        let shops = self.read_shops(filter, sql, values).await?;
        if shops.len() == filter.limit as usize {
            return Ok(ShopPage { next: shops.last().map(|shop| shop.id), shops });
        }
        // Where the candidates end, if there may be more.
        let last =
            "SELECT shop_id FROM shop_gram WHERE gram = ? AND shop_id < ? ORDER BY shop_id DESC LIMIT 1 OFFSET ?";
        let last = self.db.row(last, args![ngram.as_str(), before, CANDIDATES - 1]).await?;
        let next = last.map(|row| row.int(0)).transpose()?.and_then(|id| ShopId::new(id).ok());
        Ok(ShopPage { shops, next })
    }

    /// The rarest of some n-grams that are spread over the text. `None` if no shop has one of them.
    async fn rarest_ngram(&self, folded: &str, before: i64) -> Result<Option<String>> {
        let all = ngrams(folded, folded.chars().count().clamp(1, MAX_NGRAM_CHARS));
        let step = all.len().div_ceil(MAX_NGRAMS).max(1);
        let mut some: Vec<String> = all.into_iter().step_by(step).collect();
        let count =
            "(SELECT COUNT(*) FROM (SELECT 1 AS one FROM shop_gram WHERE gram = ? AND shop_id < ? LIMIT ?) AS counted)";
        let sql = format!("SELECT {}", vec![count; some.len()].join(", "));
        let values = some.iter().flat_map(|ngram| [ngram.as_str().into(), before.into(), CANDIDATES.into()]);
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
    fn name_is_split_into_all_its_ngrams() {
        let expected = ["a", "é", "茶", "aé", "é茶", "aé茶"];
        let mut found = all_ngrams(&fold("AÉ茶"));
        found.sort_by_key(|ngram| (ngram.chars().count(), ngram.clone()));
        assert_eq!(found, expected);
        assert_eq!(all_ngrams("aaaa"), ["a", "aa", "aaa"]);
        assert_eq!(all_ngrams("a"), ["a"]);
        assert_eq!(pattern("a%_!"), "%a!%!_!!%");
    }
}
