//! The tables of `docs/lab.md` and its Chinese version, and the chart beside them, from the JSON of a run of all versions.
//!
//! A part of a document that is replaced stands between `<!-- begin NAME -->` and `<!-- end NAME -->`: `run`, and one for each family.

use serde_json::Value;

use super::figure;
use super::svg::{Bar, bars};
use crate::reads::CALLS_AT_EXPIRY;
use crate::tiers::LOST;
use crate::{Family, Flaw, Version, registry};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    English,
    Chinese,
}

impl Language {
    const fn pick<'a>(self, english: &'a str, chinese: &'a str) -> &'a str {
        match self {
            Self::English => english,
            Self::Chinese => chinese,
        }
    }
}

/// A column of figures: its heads in both languages, and the figure of a result.
type Column = (&'static str, &'static str, fn(&Value) -> String);

const RATE: Column = ("orders/s", "订单/秒", |result| number(&result["orders_per_s"]));
const P99: Column = ("p99 ms", "p99 毫秒", |result| number(&result["p99_ms"]));
const SQL: Column = ("SQL per request", "每请求 SQL", |result| number(&result["sql_per_request"]));
const REDIS: Column = ("Redis commands (calls) per request", "每请求 Redis 命令（往返）", |result| match result
    ["redis_calls_per_request"]
    .is_null()
{
    true => number(&result["redis_per_request"]),
    false => format!("{} ({})", number(&result["redis_per_request"]), number(&result["redis_calls_per_request"])),
});

/// How much of its flaw a version has shown, in all parts of the run together. The flaws that are not counted in items or orders show in other
/// columns.
const COUNT: Column = ("count", "数量", |result| {
    const COUNTED: &[Flaw] = &[Flaw::Oversold, Flaw::Undersold, Flaw::Duplicated, Flaw::Lost, Flaw::Leaked];
    let flaw = COUNTED.iter().find(|flaw| result["expected"] == flaw.name());
    flaw.map_or_else(|| figure(None), |flaw| whole(&result[flaw.name()]))
});
const LOST_ORDERS: Column = ("lost", "丢单", |result| whole(&result["lost"]));

const fn columns(family: Family) -> &'static [Column] {
    match family {
        Family::Stock | Family::OnePerPerson | Family::PreDeduction => &[COUNT, RATE, P99, SQL, REDIS],
        Family::Queues => &[COUNT, LOST_ORDERS, RATE, P99, SQL, REDIS],
        Family::Locks => &[
            COUNT,
            ("acquired and released per second", "每秒加锁并释放", RATE.2),
            P99,
            ("Redis commands per lock", "每次加锁的 Redis 命令", |result| number(&result["redis_per_request"])),
        ],
        Family::SoldOut => &[
            COUNT,
            RATE,
            ("Redis calls per refusal", "每次拒绝的 Redis 往返", |result| {
                number(&result["redis_calls_per_request"])
            }),
        ],
        Family::Reads => &[
            ("hot", "热点", |result| named(result, "database calls per 10,000 reads of a hot shop")),
            ("missing", "不存在", |result| named(result, "database calls per 10,000 reads of missing shops")),
            ("expired", "刚过期", |result| named(result, "database calls per 10,000 reads of an expired shop")),
            ("all expire, in 100 ms", "一起过期，100 毫秒内", |result| named(result, CALLS_AT_EXPIRY)),
        ],
        Family::Limits => &[
            ("requests of one user that passed", "单个用户通过的请求", |result| {
                named(result, "requests of one user that passed")
            }),
            ("ms for 30,000 ids", "3 万个 ID 的毫秒数", |result| named(result, "ms for 30,000 ids")),
            ("Redis calls per request", "每请求 Redis 往返", |result| number(&result["redis_calls_per_request"])),
        ],
        Family::Tiers => &[
            RATE,
            P99,
            ("refusals/s", "拒绝/秒", |result| named(result, "refusals per second")),
            SQL,
            ("Redis commands per request", "每请求 Redis 命令", |result| number(&result["redis_per_request"])),
            ("lost after a kill", "宕机后丢单", |result| named(result, LOST)),
        ],
    }
}

/// Replaces all parts of a document by those of a run.
///
/// # Errors
/// If the run has not all versions, or the document not all parts.
pub fn update(document: &str, run: &Value, language: Language) -> Result<String, String> {
    let mut updated = replace(document, "run", &summary(run, language)?)?;
    for family in Family::ALL {
        updated = replace(&updated, family.name(), &table(*family, run, language)?)?;
    }
    Ok(updated)
}

/// The orders per second of all versions that sell.
///
/// # Errors
/// If the run has not all versions.
pub fn chart(run: &Value) -> Result<String, String> {
    const SELLING: &[Family] = &[Family::Stock, Family::OnePerPerson, Family::PreDeduction, Family::Queues];
    let mut rates = Vec::new();
    for version in registry::all().filter(|version| SELLING.contains(&version.family)) {
        let result = result(run, version)?;
        if let Some(value) = result["orders_per_s"].as_f64() {
            rates.push(Bar { label: version.name, value, flawed: result["expected"] != "sound" });
        }
    }
    Ok(bars("orders per second; red: flawed, green: sound", &rates))
}

fn result<'a>(run: &'a Value, version: &Version) -> Result<&'a Value, String> {
    let mut results = run["versions"].as_array().into_iter().flatten();
    results.find(|result| result["name"] == version.name).ok_or_else(|| format!("{} was not run", version.name))
}

fn summary(run: &Value, language: Language) -> Result<String, String> {
    let of = |name: &str| run[name].as_u64().ok_or_else(|| format!("the run has no {name:?}"));
    let (buyers, stock, processors) = (of("buyers")?, of("stock")?, of("processors")?);
    let seconds = run["seconds"].as_f64().unwrap_or_default();
    let debug = run["debug_build"] == true;
    let (mut all, mut expected) = (0, 0);
    for version in registry::all() {
        all += 1;
        expected += usize::from(result(run, version)?["as_expected"] == true);
    }
    Ok(match language {
        Language::English => format!(
            "Figures below: {buyers} buyers, a stock of {stock}, a {} build, {processors} processors; {expected} of {all} versions \
             as expected, in {seconds:.0} s.",
            if debug { "debug" } else { "release" }
        ),
        Language::Chinese => format!(
            "以下数据：{buyers} 个买家，{stock} 件库存，{}，{processors} 个处理器；{all} 个版本中 {expected} 个符合预期，用时 {seconds:.0} 秒。",
            if debug { "调试构建" } else { "发布构建" }
        ),
    })
}

/// The heads of the table of a family.
fn heads(family: Family, language: Language) -> Vec<&'static str> {
    let mut heads = vec![language.pick("version", "版本"), language.pick("result", "结果")];
    heads.extend(columns(family).iter().map(|(english, chinese, _)| language.pick(english, chinese)));
    heads.push(language.pick("what happens", "说明"));
    heads
}

fn table(family: Family, run: &Value, language: Language) -> Result<String, String> {
    let (heads, columns) = (heads(family, language), columns(family));
    let mut lines = vec![format!("| {} |", heads.join(" | ")), format!("|{}", "---|".repeat(heads.len()))];
    for version in registry::all().filter(|version| version.family == family) {
        let result = result(run, version)?;
        let mut cells = vec![link(version), outcome(result, language)];
        cells.extend(columns.iter().map(|(_, _, cell)| cell(result)));
        cells.push(what_happens(version, result, language).replace('|', "\\|"));
        lines.push(format!("| {} |", cells.join(" | ")));
    }
    Ok(lines.join("\n"))
}

/// The name of the version with a link to its file.
fn link(version: &Version) -> String {
    let name = version.name.split_once('/').map_or(version.name, |(_, name)| name);
    format!("[`{name}`](../crates/lab/src/{}.rs)", version.name.replace('-', "_"))
}

fn outcome(result: &Value, language: Language) -> String {
    let chinese = |flaw: Flaw| match flaw {
        Flaw::Oversold => "超卖",
        Flaw::Undersold => "少卖",
        Flaw::Duplicated => "重复",
        Flaw::Lost => "丢单",
        Flaw::Leaked => "泄漏",
        Flaw::Overload => "过载",
        Flaw::Stale => "旧值",
        Flaw::LoggedOut => "被登出",
        Flaw::Inconsistent => "不一致",
    };
    let flaw = Flaw::ALL.iter().find(|flaw| result["expected"] == flaw.name());
    match (result["as_expected"].as_bool(), flaw) {
        (None, _) => language.pick("skipped", "跳过").to_owned(),
        (Some(false), _) => language.pick("**not as expected**", "**不符合预期**").to_owned(),
        (Some(true), None) => language.pick("holds", "正确").to_owned(),
        (Some(true), Some(flaw)) => {
            format!("**{}**", language.pick(&flaw.name().replace('-', " "), chinese(*flaw)))
        }
    }
}

/// The reason for the verdict. In Chinese, that of the story: what is wrong with a flawed version, what a sound one adds.
fn what_happens(version: &Version, result: &Value, language: Language) -> String {
    const WRONG: &str = "问题：";
    if language == Language::English {
        return result["reason"].as_str().unwrap_or_default().to_owned();
    }
    let wrong = version.story_zh.lines().find_map(|line| line.trim().strip_prefix(WRONG));
    let first = version.story_zh.lines().next().unwrap_or_default();
    if result["expected"] == "sound" { first } else { wrong.unwrap_or(first) }.to_owned()
}

/// A figure with thousands separated.
fn number(value: &Value) -> String {
    let text = figure(value.as_f64());
    if text.len() <= 3 || text.contains('.') {
        return text;
    }
    let mut separated = String::new();
    for (index, digit) in text.chars().enumerate() {
        if index > 0 && (text.len() - index).is_multiple_of(3) {
            separated.push(',');
        }
        separated.push(digit);
    }
    separated
}

/// A count, which has no decimals.
fn whole(value: &Value) -> String {
    let number = number(value);
    number.strip_suffix(".00").or_else(|| number.strip_suffix(".0")).unwrap_or(&number).to_owned()
}

/// One of the other figures of a version.
fn named(result: &Value, name: &str) -> String {
    let mut figures = result["figures"].as_array().into_iter().flatten();
    figures.find(|figure| figure[0] == name).map_or_else(|| figure(None), |figure| number(&figure[1]))
}

/// Replaces what is between the two marks of a name.
fn replace(document: &str, name: &str, by: &str) -> Result<String, String> {
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"));
    let missing = || format!("there is no part {name:?}");
    let (before, rest) = document.split_once(&begin).ok_or_else(missing)?;
    let (_, after) = rest.split_once(&end).ok_or_else(missing)?;
    Ok(format!("{before}{begin}{by}\n{end}{after}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DOCUMENTS: &[(&str, Language)] = &[
        (include_str!("../../../../docs/lab.md"), Language::English),
        (include_str!("../../../../docs/lab.zh-CN.md"), Language::Chinese),
    ];

    /// A run in which all versions came out as expected.
    fn run() -> Value {
        let version = |version: &Version| {
            let expected = match version.expected {
                crate::Expected::Sound => "sound",
                crate::Expected::Flawed(flaw) => flaw.name(),
            };
            json!({
                "name": version.name, "expected": expected, "as_expected": true, "reason": "planted | reason",
                "orders_per_s": 12345.6, "redis_per_request": 3.05, "redis_calls_per_request": 1.0,
                "lost": match version.expected {
                    crate::Expected::Sound => 0,
                    crate::Expected::Flawed(_) => 39,
                },
                "leaked": 2000, "figures": [["refusals per second", 1234.0]],
            })
        };
        let versions: Vec<Value> = registry::all().map(version).collect();
        json!({
            "buyers": 2000, "stock": 200, "processors": 2, "debug_build": false, "seconds": 188.2, "versions": versions,
        })
    }

    #[test]
    fn all_tables_of_both_documents_are_replaced() {
        for (document, language) in DOCUMENTS {
            let updated = update(document, &run(), *language).unwrap();
            for version in registry::all() {
                let row = updated.lines().find(|line| line.starts_with(&format!("| {} |", link(version))));
                assert!(row.is_some(), "{language:?}: no row for {}", version.name);
            }
            assert_eq!(updated.matches("| 12,346 |").count(), 41, "{updated}");
            // The counts do not depend on the language.
            let row = updated.lines().find(|line| line.contains("rabbitmq_early_ack.rs")).unwrap();
            assert!(row.contains("** | 39 | 39 | 12,346 |"), "{row}");
            let row = updated.lines().find(|line| line.contains("one_per_person/leaking_lock.rs")).unwrap();
            assert!(row.contains("** | 2,000 | 12,346 |"), "{row}");
            let row = updated.lines().find(|line| line.contains("stream_group.rs")).unwrap();
            assert!(row.contains(" | – | 0 | 12,346 |"), "{row}");
            assert_eq!(update(&updated, &run(), *language).unwrap(), updated);
        }
    }

    #[test]
    fn a_cell_says_what_came_out() {
        let mut result = json!({ "expected": "logged-out", "as_expected": true });
        assert_eq!(outcome(&result, Language::English), "**logged out**");
        result["as_expected"] = false.into();
        assert_eq!(outcome(&result, Language::Chinese), "**不符合预期**");
        result["as_expected"] = Value::Null;
        assert_eq!(outcome(&result, Language::English), "skipped");
    }

    #[test]
    fn an_incomplete_run_is_refused() {
        let mut run = run();
        run["versions"].as_array_mut().unwrap().retain(|result| result["name"] != "stock/no-check");
        let refused = update(DOCUMENTS[0].0, &run, Language::English).unwrap_err();
        assert!(refused.contains("stock/no-check"), "{refused}");
        assert!(chart(&run).is_err());
    }

    #[test]
    fn a_document_lists_every_version_with_a_file_that_exists() {
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for version in registry::all() {
            for (document, language) in DOCUMENTS {
                assert!(document.contains(&link(version)), "{language:?}: {} is missing", version.name);
            }
            let file = source.join(version.name.replace('-', "_")).with_extension("rs");
            let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            assert_eq!(text, version.source, "{}", version.name);
        }
    }

    /// They are written by `make lab-docs`, which a change of the columns does not run.
    #[test]
    fn the_tables_of_both_documents_have_the_columns_of_the_code() {
        for (document, language) in DOCUMENTS {
            for family in Family::ALL {
                let begin = format!("<!-- begin {} -->\n", family.name());
                let (_, table) = document.split_once(&begin).unwrap();
                let lines: Vec<&str> = table.lines().take_while(|line| line.starts_with('|')).collect();
                let heads = heads(*family, *language);
                assert_eq!(lines[0], format!("| {} |", heads.join(" | ")), "{language:?}");
                for line in &lines {
                    let cells = line.replace("\\|", "").matches('|').count() - 1;
                    assert_eq!(cells, heads.len(), "{language:?}: {line}");
                }
            }
        }
    }

    #[test]
    fn thousands_are_separated() {
        let shown: Vec<String> = [0.5, 999.0, 1234.0, 1_234_567.0].map(|value| number(&value.into())).into();
        assert_eq!(shown, ["0.50", "999", "1,234", "1,234,567"]);
    }
}
