//! The part of the suite about users: challenges, sessions, accounts.

use stampede_core::ports::{
    Challenge, ChallengeId, ChallengeSelector, Disabled, Fenced, LogInOutcome, Session, SessionId,
};

use super::*;

const IN_FIVE_MINUTES: Duration = Duration::from_secs(300);

/// The challenge `n` of a phone, requested from the address `from` at `at`.
fn challenge(n: u8, phone: &Phone, from: u8, at: Timestamp) -> Challenge {
    Challenge {
        id: ChallengeId([n; 16]),
        phone: phone.clone(),
        address: [192, 0, 2, from].into(),
        code_mac: vec![n; 32],
        digits: 6,
        created_at: at,
        expires_at: at.plus(IN_FIVE_MINUTES),
    }
}

pub async fn challenge_has_limited_attempts_and_is_used_once(stores: &Stores) {
    let accounts = &stores.accounts;
    let phone = Phone::parse("13800138000").unwrap();
    let later = |ms| NOW.plus(Duration::from_millis(ms));
    let (mine, guessers) = (challenge(1, &phone, 1, NOW), challenge(2, &phone, 2, later(1)));
    for one in [&mine, &guessers] {
        accounts.put_challenge(one, 20).await.unwrap();
    }
    let tries: Vec<_> = (0..stampede_testkit::count(1000, 50))
        .map(|n| {
            let (accounts, phone, guessers) = (accounts.clone(), phone.clone(), guessers.clone());
            let by_id = ChallengeSelector::Id(guessers.id);
            let which = if n % 2 == 0 { by_id } else { ChallengeSelector::NewestFrom(guessers.address) };
            tokio::spawn(async move {
                let tried = accounts.try_challenge(&phone, which, 5, NOW).await.unwrap();
                assert!(tried.as_ref().is_none_or(|one| *one == guessers));
                tried.is_some()
            })
        })
        .collect();
    let mut compared = 0;
    for one in tries {
        compared += u32::from(one.await.unwrap());
    }
    assert_eq!(compared, 5);
    assert_eq!(accounts.login_failures(&phone).await.unwrap(), 5);

    let mine_by_id = ChallengeSelector::Id(mine.id);
    let tried = async |phone: &Phone, which, now| accounts.try_challenge(phone, which, 5, now).await.unwrap();
    assert_eq!(tried(&phone, mine_by_id, NOW).await, Some(mine.clone()), "another's tries are not mine");
    let (other, elsewhere) = (Phone::parse("13900000000").unwrap(), [192, 0, 2, 9].into());
    assert_eq!(tried(&other, mine_by_id, NOW).await, None, "another phone");
    assert_eq!(tried(&phone, ChallengeSelector::NewestFrom(elsewhere), NOW).await, None, "another address");
    assert_eq!(tried(&phone, mine_by_id, mine.expires_at).await, None, "expired");
    let newer = challenge(3, &phone, 1, later(2));
    accounts.put_challenge(&newer, 20).await.unwrap();
    assert_eq!(tried(&phone, ChallengeSelector::NewestFrom(mine.address), NOW).await, Some(newer), "the newest");
    // Of two that were created in the same millisecond the second is newer, whatever their ids.
    for n in [9, 8] {
        accounts.put_challenge(&challenge(n, &phone, 3, later(3)), 20).await.unwrap();
    }
    let newest = tried(&phone, ChallengeSelector::NewestFrom([192, 0, 2, 3].into()), NOW).await.unwrap();
    assert_eq!(newest.id, ChallengeId([8; 16]));
    assert_eq!(accounts.login_failures(&phone).await.unwrap(), 8, "refused tries do not count");

    let newcomer = User { id: user(5), phone: phone.clone(), nickname: "n".into() };
    let log_in = async |of: &Challenge, newcomer: &User, session: u8| {
        accounts.log_in(of.id, newcomer, SessionId([session; 16]), mine.expires_at, 20, NOW).await.unwrap()
    };
    let stranger = User { phone: other, ..newcomer.clone() };
    assert_eq!(log_in(&mine, &stranger, 1).await, LogInOutcome::Used, "another phone's");
    let done = LogInOutcome::Done { user: newcomer.clone(), ended: vec![] };
    assert_eq!(log_in(&mine, &newcomer, 1).await, done);
    assert_eq!(accounts.login_failures(&phone).await.unwrap(), 0, "a login forgives");
    assert_eq!(log_in(&mine, &newcomer, 2).await, LogInOutcome::Used, "once");
    let again = User { id: user(6), ..newcomer.clone() };
    assert_eq!(log_in(&guessers, &again, 3).await, done, "the phone keeps its user");
    assert_eq!(accounts.user(user(5)).await.unwrap(), Some(newcomer));
    assert_eq!(accounts.user(user(6)).await.unwrap(), None);

    assert_eq!(accounts.secret("k", b"first").await.unwrap(), b"first");
    assert_eq!(accounts.secret("k", b"second").await.unwrap(), b"first");
}

pub async fn challenges_of_a_phone_are_bounded(stores: &Stores) {
    let accounts = &stores.accounts;
    let phone = Phone::parse("13800138000").unwrap();
    let at = |ms| NOW.plus(Duration::from_millis(ms));
    accounts.put_challenge(&challenge(1, &phone, 1, NOW), 5).await.unwrap();
    for n in 2..30 {
        accounts.put_challenge(&challenge(n, &phone, 2, at(n.into())), 5).await.unwrap();
    }
    let mut live = Vec::new();
    for n in 1..30 {
        let which = ChallengeSelector::Id(ChallengeId([n; 16]));
        if accounts.try_challenge(&phone, which, 5, at(30)).await.unwrap().is_some() {
            live.push(n);
        }
    }
    assert_eq!(live, [1, 26, 27, 28, 29], "one address does not push out another's");

    // Expired challenges are deleted. Failures are kept for a month, or until a login if they have made the codes longer.
    assert_eq!(accounts.delete_expired(None, NOW).await.unwrap(), Fenced::Done(0));
    let later = NOW.plus(IN_FIVE_MINUTES * 2);
    assert_eq!(accounts.delete_expired(None, later).await.unwrap(), Fenced::Done(5));
    assert_eq!(accounts.login_failures(&phone).await.unwrap(), 5);
    let day = Duration::from_secs(24 * 3600);
    assert_eq!(accounts.delete_expired(None, NOW.plus(day * 29)).await.unwrap(), Fenced::Done(0));
    assert_eq!(accounts.delete_expired(None, NOW.plus(day * 31)).await.unwrap(), Fenced::Done(1));
    assert_eq!(accounts.login_failures(&phone).await.unwrap(), 0);
    for n in 30..50 {
        accounts.put_challenge(&challenge(n, &phone, 1, NOW), 20).await.unwrap();
        for _ in 0..5 {
            let which = ChallengeSelector::Id(ChallengeId([n; 16]));
            accounts.try_challenge(&phone, which, 5, NOW).await.unwrap().unwrap();
        }
    }
    accounts.delete_expired(None, NOW.plus(day * 365)).await.unwrap();
    assert_eq!(accounts.login_failures(&phone).await.unwrap(), LONG_CODES_AFTER);
}

/// Opens a session with a code for the user of the phone, or for this user if there is none.
pub(super) async fn open_session(
    stores: &Stores,
    user: &User,
    n: u8,
    created_at: Timestamp,
    expires_at: Timestamp,
) -> LogInOutcome {
    let accounts = &stores.accounts;
    let challenge = challenge(n, &user.phone, 1, created_at);
    accounts.put_challenge(&challenge, 20).await.unwrap();
    accounts.log_in(challenge.id, user, SessionId([n; 16]), expires_at, 3, created_at).await.unwrap()
}

pub async fn sessions_are_extended_and_ended(stores: &Stores) {
    let accounts = &stores.accounts;
    let phone = Phone::parse("13800138001").unwrap();
    let soon = NOW.plus(Duration::from_secs(60));
    let id = SessionId([7; 16]);
    let newcomer = User { id: user(5), phone, nickname: "n".into() };
    let opened = open_session(stores, &newcomer, 7, NOW, soon).await;
    assert_eq!(opened, LogInOutcome::Done { user: newcomer.clone(), ended: vec![] });
    let session = Session { id, user: user(5), created_at: NOW, expires_at: soon };
    assert_eq!(accounts.session(id, NOW).await.unwrap(), Some(session));
    assert_eq!(accounts.session(id, soon).await.unwrap(), None, "expired");

    let later = Session { expires_at: soon.plus(Duration::from_secs(60)), ..session };
    accounts.touch_sessions(&[later, session]).await.unwrap();
    assert_eq!(accounts.session(id, soon).await.unwrap(), Some(later), "an expiry never moves back");
    assert_eq!(accounts.delete_expired(None, soon).await.unwrap(), Fenced::Done(0));
    assert_eq!(accounts.sessions_of(user(5), NOW).await.unwrap(), [later]);
    assert_eq!(accounts.sessions_of(user(6), NOW).await.unwrap(), []);
    assert!(!accounts.end_session(user(6), id).await.unwrap(), "another's session");
    assert!(accounts.end_session(user(5), id).await.unwrap());
    assert!(!accounts.end_session(user(5), id).await.unwrap(), "once");
    assert_eq!(accounts.session(id, NOW).await.unwrap(), None);
    accounts.touch_sessions(&[later]).await.unwrap();
    assert_eq!(accounts.session(id, NOW).await.unwrap(), None, "an ended session is not revived");

    // At most three; expired ones do not count.
    let mut ended = Vec::new();
    for (n, expires_at) in (10..16).zip([NOW, soon, soon, soon, soon, soon]) {
        let created_at = NOW.plus(Duration::from_millis(n.into()));
        let LogInOutcome::Done { ended: now_ended, .. } =
            open_session(stores, &newcomer, n, created_at, expires_at).await
        else {
            panic!("no session");
        };
        ended.push(now_ended);
    }
    let session = |n: u8| SessionId([n; 16]);
    assert_eq!(ended, [vec![], vec![], vec![], vec![], vec![session(11)], vec![session(12)]]);
    let mut all = accounts.end_sessions(user(5)).await.unwrap().unwrap();
    all.sort_by_key(|id| id.0);
    assert_eq!(all, [10, 13, 14, 15].map(session));
    assert_eq!(accounts.sessions_of(user(5), NOW).await.unwrap(), []);
    assert_eq!(accounts.end_sessions(user(6)).await.unwrap(), None, "no such user");
}

pub async fn disabled_account_has_no_session(stores: &Stores) {
    let accounts = &stores.accounts;
    let newcomer = User { id: user(5), phone: Phone::parse("13800138001").unwrap(), nickname: "n".into() };
    let soon = NOW.plus(Duration::from_secs(60));
    open_session(stores, &newcomer, 1, NOW, soon).await;
    let account = accounts.account(user(5)).await.unwrap().unwrap();
    assert_eq!((&account.user, account.created_at, account.disabled), (&newcomer, NOW, false));
    let disable = async |disabled| accounts.set_disabled(user(5), disabled).await.unwrap();
    assert_eq!(disable(true).await, Some(Disabled { was: false, ended: vec![SessionId([1; 16])] }));
    assert_eq!(disable(true).await, Some(Disabled { was: true, ended: vec![] }));
    assert_eq!(accounts.session(SessionId([1; 16]), NOW).await.unwrap(), None);
    assert!(accounts.account_of(&newcomer.phone).await.unwrap().unwrap().disabled);
    assert_eq!(open_session(stores, &newcomer, 2, NOW, soon).await, LogInOutcome::Disabled);
    assert_eq!(accounts.sessions_of(user(5), NOW).await.unwrap(), []);
    let used = accounts.log_in(ChallengeId([2; 16]), &newcomer, SessionId([2; 16]), soon, 3, NOW).await.unwrap();
    assert_eq!(used, LogInOutcome::Used, "the code is used up");
    assert_eq!(disable(false).await, Some(Disabled { was: true, ended: vec![] }));
    let opened = open_session(stores, &newcomer, 3, NOW, soon).await;
    assert_eq!(opened, LogInOutcome::Done { user: newcomer, ended: vec![] });
    assert_eq!(accounts.set_disabled(user(6), true).await.unwrap(), None, "no such user");
}
