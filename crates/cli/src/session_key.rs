//! The key that signs session tokens, from the environment or a file. Without either, the key in the ledger is used.

use anyhow::{Context as _, bail};
use stampede_engine::SessionKeys;
use stampede_http::is_predictable;

const VARIABLE: &str = "STAMPEDE_SESSION_KEY";

/// Reads the current key and optionally the previous one from the environment or the file; `None` if neither is given.
pub fn load(file: &str) -> anyhow::Result<Option<SessionKeys>> {
    if let Some(text) = std::env::var_os(VARIABLE) {
        let text = text.into_string().ok().with_context(|| format!("{VARIABLE} is not valid text"))?;
        return parse(&text).context(VARIABLE).map(Some);
    }
    if file.is_empty() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read the session key in {file}"))?;
    parse(&text).with_context(|| format!("login.session_key_file {file}")).map(Some)
}

fn parse(text: &str) -> anyhow::Result<SessionKeys> {
    let keys = text.split(['\n', ',']).map(str::trim).filter(|line| !line.is_empty());
    match keys.map(key).collect::<anyhow::Result<Vec<_>>>()?[..] {
        [current] => Ok(SessionKeys { current, previous: None }),
        [current, previous] if current != previous => Ok(SessionKeys { current, previous: Some(previous) }),
        [_, _] => bail!("the two session keys must differ"),
        _ => bail!("expected one session key, or two: the current one and the previous one"),
    }
}

/// Errors never contain any part of the key.
fn key(text: &str) -> anyhow::Result<[u8; 32]> {
    let mut key = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        bail!("a session key has 64 hexadecimal digits");
    }
    for (place, byte) in key.iter_mut().enumerate() {
        let digits = &text[2 * place..2 * place + 2];
        *byte = u8::from_str_radix(digits, 16).ok().context("a session key has 64 hexadecimal digits")?;
    }
    if is_predictable(text) {
        bail!(
            "a session key must be random, and the digits of this one repeat or count up: create one with `openssl rand -hex 32`"
        );
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_or_two_keys_are_accepted_and_weak_ones_rejected() {
        let one = "5d0c81f7e92a46b3a1de7788f04c9b2563d2f01b9ce8574a0f6a2d91c37be4ff".to_owned();
        let two = "c1a5e8027b9d4f36880d1e52f7a3b96c40e7d2158bfa63c994e01d7a25b8f3cd".to_owned();
        let keys = parse(&format!("{one}\n")).unwrap();
        assert_eq!((keys.current[0], keys.current[31], keys.previous), (0x5d, 0xff, None));
        for text in [format!("{two}\n{one}\n"), format!("{two},{one}")] {
            let keys = parse(&text).unwrap();
            assert_eq!((keys.current[31], keys.previous.unwrap()[31]), (0xcd, 0xff));
        }
        for wrong in [
            "",
            "abc",
            &"0".repeat(64),
            &"0123456789abcdef".repeat(4),
            &("ab".repeat(31) + "cd"),
            &"zz".repeat(32),
            &"+1".repeat(32),
            &format!("{one}\n{one}"),
            &"密".repeat(22),
        ] {
            let error = format!("{:#}", parse(wrong).unwrap_err());
            assert!(wrong.is_empty() || !error.contains(wrong), "{error}");
        }
        assert!(parse(&format!("{one}\n{two}\n{one}")).is_err());
    }
}
