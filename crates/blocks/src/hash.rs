//! The hash of a block, and what it starts from.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Seed of all block hashes of one cluster. Another seed in another cluster keeps prefixes from being compared across.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HashSeed(pub u64);

/// Content hash of a block and of everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u64);

/// What separates caches that may not share blocks: pool namespace, LoRA adapter, and salt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Namespace {
    encoded: Vec<u8>,
}

impl Namespace {
    /// A namespace from the pool's own text, an adapter's name and a salt; the last two may be empty.
    ///
    /// Parts are length-prefixed, so that no two different triples encode alike.
    #[must_use]
    pub fn new(pool: &str, adapter: &str, cache_salt: &str) -> Self {
        let mut encoded = Vec::with_capacity(24 + pool.len() + adapter.len() + cache_salt.len());
        for part in [pool, adapter, cache_salt] {
            encoded.extend_from_slice(&(part.len() as u64).to_le_bytes());
            encoded.extend_from_slice(part.as_bytes());
        }
        Self { encoded }
    }

    /// The parent of every first block of this namespace. It is no block and is never stored.
    #[must_use]
    pub fn root(&self, seed: HashSeed) -> BlockHash {
        BlockHash(xxh3_64_with_seed(&self.encoded, seed.0))
    }
}

/// Hashes of the whole blocks of a prompt, in order. A last block that is not full has none.
///
/// A block size of zero gives no blocks.
#[must_use]
pub fn block_hashes(root: BlockHash, tokens: &[u32], block_size_tokens: usize) -> Vec<BlockHash> {
    let mut hasher = BlockHasher::new(root, block_size_tokens);
    let mut hashes = Vec::with_capacity(tokens.len().checked_div(block_size_tokens).unwrap_or(0));
    hasher.push(tokens, &mut hashes);
    hashes
}

/// Blocks of a prompt that a cache can serve: an engine must compute at least the last token, so a hit never covers it.
#[must_use]
pub fn usable_blocks(prompt_tokens: usize, block_size_tokens: usize) -> usize {
    prompt_tokens.saturating_sub(1).checked_div(block_size_tokens).unwrap_or(0)
}

/// Hashes blocks as their tokens arrive.
///
/// The hash of a block is [`chain`] of its parent's hash and of the XXH3-64 of its tokens in little-endian bytes. The tokens
/// are hashed without the parent, so that a processor works on several blocks at once; only the chain, some cycles a block,
/// waits for the block before.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    parent: BlockHash,
    block_size_tokens: usize,
    /// Tokens of the open block, as they are hashed.
    open: Vec<u8>,
}

impl BlockHasher {
    /// A hasher whose first block follows `parent`: a namespace's root, or an earlier block.
    #[must_use]
    pub fn new(parent: BlockHash, block_size_tokens: usize) -> Self {
        Self { parent, block_size_tokens, open: Vec::with_capacity(4 * block_size_tokens) }
    }

    /// Hash of the last whole block, or what the hasher started from.
    #[must_use]
    pub fn parent(&self) -> BlockHash {
        self.parent
    }

    /// Tokens of the block that is not full yet.
    #[must_use]
    pub fn open_tokens(&self) -> usize {
        self.open.len() / 4
    }

    /// Takes tokens and appends the hash of each block that became full.
    pub fn push(&mut self, tokens: &[u32], hashes: &mut Vec<BlockHash>) {
        if self.block_size_tokens == 0 {
            return;
        }
        let mut rest = tokens;
        if self.open_tokens() > 0 {
            let missing = self.block_size_tokens - self.open_tokens();
            let (now, later) = rest.split_at(missing.min(rest.len()));
            self.open.extend(now.iter().flat_map(|token| token.to_le_bytes()));
            rest = later;
            if self.open_tokens() < self.block_size_tokens {
                return;
            }
            self.parent = chain(self.parent, xxh3_64(&self.open));
            hashes.push(self.parent);
            self.open.clear();
        }
        let whole = rest.chunks_exact(self.block_size_tokens);
        self.open.extend(whole.remainder().iter().flat_map(|token| token.to_le_bytes()));
        // A compiler that knows the size hashes the tokens as they lie there.
        match self.block_size_tokens {
            16 => self.chain_all(rest.as_chunks::<16>().0, xxh3_of_tokens, hashes),
            32 => self.chain_all(rest.as_chunks::<32>().0, xxh3_of_tokens, hashes),
            size => {
                let mut bytes = vec![0; 4 * size];
                self.chain_all(whole, |block| xxh3_by_way_of(block, &mut bytes), hashes);
            }
        }
    }

    fn chain_all<Block>(
        &mut self,
        blocks: impl IntoIterator<Item = Block>,
        mut hash_of_tokens: impl FnMut(Block) -> u64,
        hashes: &mut Vec<BlockHash>,
    ) {
        let mut parent = self.parent;
        hashes.extend(blocks.into_iter().map(|block| {
            parent = chain(parent, hash_of_tokens(block));
            parent
        }));
        self.parent = parent;
    }
}

/// XXH3-64 of tokens in little-endian bytes, by way of some bytes of their length.
fn xxh3_by_way_of(tokens: &[u32], bytes: &mut [u8]) -> u64 {
    let (words, _) = bytes.as_chunks_mut::<4>();
    words.iter_mut().zip(tokens).for_each(|(word, token)| *word = token.to_le_bytes());
    xxh3_64(bytes)
}

/// The first 128 bytes of XXH3's secret.
const SECRET: [u64; 16] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
    0xcb00_c391_bb52_283c,
    0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471,
    0xd8ac_dea9_46ef_1938,
    0x3f34_9ce3_3f76_faa8,
    0x1d4f_0bc7_c7bb_dcf9,
    0x3159_b4cd_4be0_518a,
    0x6473_78d9_c97e_9fc8,
];

/// XXH3-64 of tokens in little-endian bytes, without writing these down: its form for 17 to 128 bytes (xxHash's
/// specification, "Medium inputs"), for multiples of 32. Takes a third of the time.
#[inline]
fn xxh3_of_tokens<const TOKENS: usize>(tokens: &[u32; TOKENS]) -> u64 {
    const { assert!(TOKENS >= 8 && TOKENS <= 32 && TOKENS.is_multiple_of(8)) };
    let (parts, _) = tokens.as_chunks::<4>();
    let mut sum = (4 * TOKENS as u64).wrapping_mul(0x9e37_79b1_85eb_ca87);
    let word = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let mix = |[one, two, three, four]: [u32; 4], [first, second]: [u64; 2]| {
        fold(word(one, two) ^ first, word(three, four) ^ second)
    };
    // From both ends to the middle.
    let (secrets, _) = SECRET.as_chunks::<4>();
    let from_both_ends = parts.iter().zip(parts.iter().rev()).zip(secrets).take(TOKENS / 8);
    for ((front, back), [first, second, third, fourth]) in from_both_ends {
        sum = sum.wrapping_add(mix(*front, [*first, *second])).wrapping_add(mix(*back, [*third, *fourth]));
    }
    sum ^= sum >> 37;
    sum = sum.wrapping_mul(0x1656_6791_9e37_79f9);
    sum ^ sum >> 32
}

/// Both halves of a product in one.
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    (product >> 64) as u64 ^ product as u64
}

/// By which the two factors of [`chain`] differ from what is chained. Nothing about them is special.
const PARENT_MASK: u64 = SECRET[3];
const TOKENS_MASK: u64 = SECRET[4];

/// The hash of a block from its parent's hash and that of its tokens alone: the folded product of both, each changed by
/// a constant, with both themselves, the parent's turned by half of its bits.
///
/// The product lets each bit of either count for all. What stands beside it keeps a factor of zero from hiding the
/// other, so there are no tokens after which all prompts are alike. The seed of the cluster went into the root, so none
/// is needed here.
#[inline]
fn chain(parent: BlockHash, tokens: u64) -> BlockHash {
    BlockHash(fold(parent.0 ^ PARENT_MASK, tokens ^ TOKENS_MASK) ^ parent.0.rotate_left(32) ^ tokens)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn root() -> BlockHash {
        Namespace::new("model", "", "").root(HashSeed(7))
    }

    #[test]
    fn an_engine_always_computes_the_last_token() {
        assert_eq!([0, 0, 0, 0, 1, 1], [0, 1, 31, 32, 33, 64].map(|tokens| usable_blocks(tokens, 32)));
        assert_eq!(0, usable_blocks(100, 0));
    }

    #[test]
    fn namespaces_that_differ_in_one_part_share_nothing() {
        let roots: std::collections::HashSet<_> = [
            Namespace::new("a", "", ""),
            Namespace::new("", "a", ""),
            Namespace::new("", "", "a"),
            Namespace::new("ab", "", ""),
            Namespace::new("a", "b", ""),
        ]
        .iter()
        .flat_map(|namespace| [namespace.root(HashSeed(1)), namespace.root(HashSeed(2))])
        .collect();
        assert_eq!(10, roots.len());
    }

    #[test]
    fn hashes_are_the_same_on_every_machine_and_in_every_version() {
        let root = Namespace::new("model", "adapter", "salt").root(HashSeed(7));
        let hashes = block_hashes(root, &[1, 2, 3, 0x0102_0304, u32::MAX], 2);
        // Computed from the formula alone, by other code in another language.
        let expected = [3_807_691_372_300_708_060, 6_948_885_284_888_336_225].map(BlockHash);
        assert_eq!((BlockHash(359_960_380_610_927_242), expected.to_vec()), (root, hashes));
        let tokens: Vec<u32> = (0..64u64).map(|at| (at * 2_654_435_761 % 150_000) as u32).collect();
        let last = |size: usize| block_hashes(root, &tokens, size).last().map(|hash| hash.0);
        let expected = [5_820_360_742_430_964_411, 14_128_488_681_333_652_931, 190_064_607_345_623_618];
        assert_eq!(expected.map(Some), [12, 16, 32].map(last));
    }

    #[test]
    fn no_tokens_make_all_prompts_alike() {
        let (one, other) = (BlockHash(1), BlockHash(2));
        assert_ne!(chain(one, TOKENS_MASK), chain(other, TOKENS_MASK));
        assert_ne!(chain(BlockHash(PARENT_MASK), 1), chain(BlockHash(PARENT_MASK), 2));
    }

    proptest! {
        #[test]
        fn equal_hashes_mean_equal_prefixes(
            tokens in prop::collection::vec(0u32..4, 0..64),
            other in prop::collection::vec(0u32..4, 0..64),
            block in 1usize..9,
        ) {
            let (left, right) = (block_hashes(root(), &tokens, block), block_hashes(root(), &other, block));
            for position in 0..left.len().min(right.len()) {
                let end = (position + 1) * block;
                prop_assert_eq!(tokens[..end] == other[..end], left[position] == right[position]);
            }
        }

        #[test]
        fn tokens_are_hashed_as_the_library_does(tokens in any::<[u32; 32]>()) {
            let mut bytes = [0; 128];
            prop_assert_eq!(xxh3_by_way_of(&tokens, &mut bytes), xxh3_of_tokens(&tokens));
            let (half, _) = tokens.as_chunks::<16>();
            prop_assert_eq!(xxh3_by_way_of(&half[0], &mut bytes[..64]), xxh3_of_tokens(&half[0]));
        }

        /// Each bit of either turns about half of the bits of the hash.
        #[test]
        fn each_bit_counts(parent in any::<u64>(), tokens in any::<u64>(), bit in 0u32..64) {
            let hash = chain(BlockHash(parent), tokens).0;
            for other in [chain(BlockHash(parent ^ 1 << bit), tokens), chain(BlockHash(parent), tokens ^ 1 << bit)] {
                let turned = (hash ^ other.0).count_ones();
                prop_assert!((8..=56).contains(&turned), "{turned}");
            }
        }

        #[test]
        fn hashing_in_pieces_equals_hashing_at_once(
            tokens in prop::collection::vec(any::<u32>(), 0..200),
            cuts in prop::collection::vec(0usize..200, 0..8),
            block in 1usize..33,
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
            cuts.extend([0, tokens.len()]);
            cuts.sort_unstable();
            let mut hasher = BlockHasher::new(root(), block);
            let mut pieces = Vec::new();
            for pair in cuts.windows(2) {
                hasher.push(&tokens[pair[0]..pair[1]], &mut pieces);
            }
            prop_assert_eq!(block_hashes(root(), &tokens, block), pieces);
            prop_assert_eq!(tokens.len() % block, hasher.open_tokens());
        }
    }
}
