//! A set of blocks that know what they follow, as runs.

use hashbrown::HashSet;
use kvist_blocks::{BlockHash, Run};

/// Blocks with the block before each, as far as it is known, as runs: each block once, a block after the one that it
/// follows wherever that is among them. The result depends on the set alone.
pub(crate) fn runs(mut blocks: Vec<(BlockHash, Option<BlockHash>)>) -> Vec<Run> {
    blocks.sort_unstable();
    let held: HashSet<BlockHash> = blocks.iter().map(|(block, _)| *block).collect();
    let mut followers: Vec<(BlockHash, BlockHash)> = Vec::with_capacity(blocks.len());
    // What is begun later lies deeper.
    let mut beginnings: Vec<(Option<BlockHash>, BlockHash)> = Vec::new();
    for (block, parent) in blocks.iter().rev() {
        match parent {
            Some(parent) if held.contains(parent) => followers.push((*parent, *block)),
            parent => beginnings.push((*parent, *block)),
        }
    }
    followers.sort_unstable();
    let mut runs = Vec::new();
    let mut told = 0;
    while let Some((parent, block)) = beginnings.pop() {
        let mut run = Run { parent, hashes: vec![block] };
        let mut last = block;
        loop {
            let first = followers.partition_point(|(parent, _)| *parent < last);
            let mut next = followers[first..].iter().take_while(|(parent, _)| *parent == last);
            let Some((_, block)) = next.next() else { break };
            beginnings.extend(next.map(|(parent, block)| (Some(*parent), *block)));
            run.hashes.push(*block);
            last = *block;
        }
        told += run.hashes.len();
        runs.push(run);
    }
    if told < blocks.len() {
        // Blocks that follow each other in a circle: hashes that have collided. They are held all the same.
        let known: HashSet<BlockHash> = runs.iter().flat_map(|run| run.hashes.iter().copied()).collect();
        let rest = blocks.into_iter().filter(|(block, _)| !known.contains(block));
        runs.extend(rest.map(|(block, parent)| Run { parent, hashes: vec![block] }));
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64) -> BlockHash {
        BlockHash(number)
    }

    fn run(parent: Option<u64>, hashes: &[u64]) -> Run {
        Run { parent: parent.map(BlockHash), hashes: hashes.iter().copied().map(BlockHash).collect() }
    }

    #[test]
    fn branches_follow_what_they_branch_from() {
        // 1 → 2 → {3, 4 → 5}, 8 → 9 without 8's parent 7.
        let parents = [(5, Some(4)), (9, Some(8)), (1, None), (4, Some(2)), (3, Some(2)), (2, Some(1)), (8, Some(7))];
        let blocks = parents.map(|(number, parent)| (block(number), parent.map(block))).to_vec();
        assert_eq!(vec![run(None, &[1, 2, 3]), run(Some(2), &[4, 5]), run(Some(7), &[8, 9])], runs(blocks));
    }

    #[test]
    fn a_circle_is_told_block_by_block() {
        let blocks = vec![(block(1), Some(block(2))), (block(2), Some(block(1))), (block(3), Some(block(3)))];
        assert_eq!(vec![run(Some(2), &[1]), run(Some(1), &[2]), run(Some(3), &[3])], runs(blocks));
    }
}
