//! Hashes that vLLM 0.32 has given.

use proptest::prelude::*;

use super::*;

const BLOCK: usize = 32;
const CBOR: [u64; 3] = [12_204_319_907_483_556_814, 4_209_074_748_214_054_702, 7_302_816_728_813_537_907];
const SALTED_CBOR: [u64; 3] = [2_380_779_606_528_305_802, 13_551_536_439_348_668_077, 9_819_577_195_044_652_652];
const PICKLE: [u64; 3] = [11_290_800_355_336_220_572, 11_189_021_207_153_552_290, 5_777_041_184_176_187_823];

fn verifier(algorithm: HashAlgorithm) -> HashVerifier {
    HashVerifier::new(&HashScheme { algorithm, seed: None })
}

fn check(verifier: &mut HashVerifier, hashes: &[u64], parent: Option<u64>, tokens: &[u32], salt: &str) -> (u64, u64) {
    let hashes: Vec<EngineHash> = hashes.iter().copied().map(EngineHash).collect();
    let parent = parent.map(EngineHash);
    let checked = verifier.check(&StatedRun { hashes: &hashes, parent, tokens, block_size_tokens: BLOCK, salt });
    (checked.verified, checked.mismatched)
}

fn tokens() -> Vec<u32> {
    (1..=96).collect()
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// R29.
#[test]
fn hashes_of_an_engine_are_recomputed() {
    let none_hash = |algorithm| hex(&verifier(algorithm).none_hash);
    assert_eq!(
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        none_hash(HashAlgorithm::Sha256Cbor)
    );
    assert_eq!("066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198", none_hash(HashAlgorithm::Sha256));
    for (algorithm, hashes, salt) in [
        (HashAlgorithm::Sha256Cbor, CBOR, ""),
        (HashAlgorithm::Sha256Cbor, SALTED_CBOR, "salty"),
        (HashAlgorithm::Sha256, PICKLE, ""),
    ] {
        let mut verifier = verifier(algorithm);
        // In two events, as when a prompt grows.
        assert_eq!((2, 0), check(&mut verifier, &hashes[..2], None, &tokens()[..2 * BLOCK], salt));
        assert_eq!((1, 0), check(&mut verifier, &hashes[2..], Some(hashes[1]), &tokens()[2 * BLOCK..], ""));
    }
}

#[test]
fn what_cannot_be_reproduced_is_no_mismatch() {
    let mut cbor = verifier(HashAlgorithm::Sha256Cbor);
    assert_eq!((0, 0), check(&mut cbor, &CBOR[1..], Some(CBOR[0]), &tokens()[BLOCK..], ""), "unknown parent");
    assert_eq!((0, 0), check(&mut cbor, &CBOR, None, &tokens()[..BLOCK], ""), "blocks were left out");
    let mut pickle = verifier(HashAlgorithm::Sha256);
    assert_eq!((0, 0), check(&mut pickle, &PICKLE, None, &tokens(), "salty"));
}

#[test]
fn another_seed_or_algorithm_is_a_mismatch_once_an_event() {
    assert_eq!((0, 1), check(&mut verifier(HashAlgorithm::Sha256), &CBOR, None, &tokens(), ""));
    let scheme = HashScheme { algorithm: HashAlgorithm::Sha256Cbor, seed: Some("0".to_owned()) };
    assert_eq!((0, 1), check(&mut HashVerifier::new(&scheme), &CBOR, None, &tokens(), ""));
}

#[test]
fn a_batch_costs_a_bounded_number_of_hashes() {
    let mut verifier = verifier(HashAlgorithm::Sha256Cbor);
    for _ in 0..MOST_BLOCKS_A_BATCH {
        assert_eq!((1, 0), check(&mut verifier, &CBOR[..1], None, &tokens()[..BLOCK], ""));
    }
    assert_eq!((0, 0), check(&mut verifier, &CBOR[..1], None, &tokens()[..BLOCK], ""));
    verifier.next_batch();
    assert_eq!((1, 0), check(&mut verifier, &CBOR[..1], None, &tokens()[..BLOCK], ""));
    assert_eq!(1, verifier.order.len());
}

/// The hashes that an engine gives a prompt.
fn given(algorithm: HashAlgorithm, tokens: &[u32], size: usize) -> Vec<EngineHash> {
    let verifier = verifier(algorithm);
    let mut parent = verifier.none_hash;
    tokens
        .chunks_exact(size)
        .map(|block| {
            parent = sha256(&verifier.encoded(&parent, block, "").unwrap());
            last_bytes(&parent)
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_token_that_is_not_what_the_engine_hashed_is_found(
        mut tokens in prop::collection::vec(prop_oneof![0..300u32, any::<i32>().prop_map(i32::unsigned_abs)], 12),
        size in 1..5usize,
        position in 0..12usize,
        flip in 1..=u32::MAX / 2,
        is_pickle in any::<bool>(),
    ) {
        tokens.iter_mut().for_each(|token| *token &= u32::MAX / 2);
        let algorithm = if is_pickle { HashAlgorithm::Sha256 } else { HashAlgorithm::Sha256Cbor };
        tokens.truncate(tokens.len() / size * size);
        let hashes = given(algorithm, &tokens, size);
        let mut stated = StatedRun { hashes: &hashes, parent: None, tokens: &tokens, block_size_tokens: size, salt: "" };
        let good = verifier(algorithm).check(&stated);
        prop_assert_eq!((hashes.len() as u64, 0), (good.verified, good.mismatched));
        let position = position % tokens.len();
        let mut flipped = tokens.clone();
        flipped[position] ^= flip;
        stated.tokens = &flipped;
        let found = verifier(algorithm).check(&stated);
        prop_assert_eq!(((position / size) as u64, 1), (found.verified, found.mismatched));
    }
}
