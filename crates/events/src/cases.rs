//! How many cases property tests try.

use proptest::test_runner::Config;

/// So many, unless `PROPTEST_CASES` says otherwise.
pub(crate) fn usually(cases: u32) -> Config {
    let stated = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    Config { cases: stated.unwrap_or(cases), ..Config::default() }
}
