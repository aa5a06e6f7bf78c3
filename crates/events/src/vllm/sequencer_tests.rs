//! A sequencer against engines that start anew, and sockets that lose, repeat and reorder.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Publish,
    Deliver,
    Lose,
    Repeat,
    Reorder,
    /// The connection breaks and comes back; what was on its way is gone.
    Reconnect,
    /// Another engine, which may have published before anybody hears of it.
    Restart(u8),
    /// The open question gets its next message.
    Answer,
    FailAnswer,
    Idle,
    GiveUp,
}

type Answer = VecDeque<Option<(u64, Bytes)>>;

struct World {
    sequencer: Sequencer,
    engine: u64,
    published: u64,
    /// Batches that the engine remembers.
    buffer: u64,
    on_the_way: VecDeque<(u64, Bytes)>,
    /// Question, and what is left of its answer; the end is an element of its own.
    answer: Option<(u64, Answer)>,
    /// What was said last: engine and number.
    last: Option<(u64, u64)>,
    is_new: bool,
}

fn payload(engine: u64, sequence: u64) -> Bytes {
    [engine.to_be_bytes(), sequence.to_be_bytes()].concat().into()
}

fn meaning(payload: &[u8]) -> (u64, u64) {
    let number = |at: usize| u64::from_be_bytes(payload[at..at + 8].try_into().unwrap());
    (number(0), number(8))
}

impl World {
    fn new(buffer: u64) -> Self {
        let mut world = Self {
            sequencer: Sequencer::new(16 * 6),
            engine: 1,
            published: 0,
            buffer,
            on_the_way: VecDeque::new(),
            answer: None,
            last: None,
            is_new: true,
        };
        world.sequencer.connected();
        world
    }

    fn publish(&mut self) {
        self.on_the_way.push_back((self.published, payload(self.engine, self.published)));
        self.published += 1;
    }

    fn deliver(&mut self) {
        if let Some((sequence, payload)) = self.on_the_way.pop_front() {
            self.sequencer.live(sequence, payload);
        }
    }

    fn answer(&mut self) {
        let Some((number, left)) = &mut self.answer else { return };
        match left.pop_front() {
            Some(Some((sequence, payload))) => self.sequencer.answered(*number, sequence, payload),
            Some(None) => self.sequencer.answer_ended(*number),
            None => {}
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Publish => self.publish(),
            Step::Deliver => self.deliver(),
            Step::Lose => drop(self.on_the_way.pop_front()),
            Step::Repeat => {
                if let Some(front) = self.on_the_way.front().cloned() {
                    self.on_the_way.push_front(front);
                }
            }
            Step::Reorder => {
                if self.on_the_way.len() > 1 {
                    self.on_the_way.swap(0, 1);
                }
            }
            Step::Reconnect => {
                self.on_the_way.clear();
                self.sequencer.connected();
            }
            Step::Restart(published) => {
                self.on_the_way.clear();
                self.engine += 1;
                self.published = u64::from(*published);
                self.answer = None;
                self.sequencer.connected();
            }
            Step::Answer => self.answer(),
            Step::FailAnswer => {
                if let Some((number, _)) = self.answer.take() {
                    self.sequencer.answer_failed(number);
                }
            }
            Step::Idle => self.sequencer.idle(),
            Step::GiveUp => self.sequencer.give_up(),
        }
        if let Some(question) = self.sequencer.take_question() {
            let first = question.from.max(self.published.saturating_sub(self.buffer));
            let batches = (first..self.published).map(|sequence| Some((sequence, payload(self.engine, sequence))));
            self.answer = Some((question.number, batches.chain([None]).collect()));
        }
        self.check();
    }

    /// What is said without a word between is gapless and of one engine.
    fn check(&mut self) {
        while let Some(said) = self.sequencer.take_said() {
            match said {
                Said::Lost => (self.last, self.is_new) = (None, false),
                Said::Restarted => (self.last, self.is_new) = (None, true),
                Said::Batch(sequence, payload) => {
                    let (engine, number) = meaning(&payload);
                    assert_eq!(number, sequence);
                    match self.last {
                        Some(last) => assert_eq!((last.0, last.1 + 1), (engine, number)),
                        None => assert!(!self.is_new || number == 0, "begins with {number}"),
                    }
                    self.last = Some((engine, number));
                }
            }
        }
    }

    fn settle(&mut self) {
        self.step(&Step::Idle);
        for _ in 0..200 {
            self.step(&Step::Deliver);
            self.step(&Step::Answer);
        }
        self.step(&Step::Idle);
        for _ in 0..200 {
            self.step(&Step::Answer);
        }
        let expected = self.published.checked_sub(1).map(|last| (self.engine, last));
        assert_eq!(expected, self.last);
        assert!(!self.sequencer.is_asking());
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        10 => Just(Step::Publish),
        8 => Just(Step::Deliver),
        3 => Just(Step::Lose),
        1 => Just(Step::Repeat),
        1 => Just(Step::Reorder),
        1 => Just(Step::Reconnect),
        1 => (0u8..8).prop_map(Step::Restart),
        8 => Just(Step::Answer),
        1 => Just(Step::FailAnswer),
        1 => Just(Step::Idle),
        1 => Just(Step::GiveUp),
    ];
    prop::collection::vec(step, 0..80)
}

proptest! {
    #![proptest_config(crate::cases::usually(1000))]

    /// R14, R15, R16.
    #[test]
    fn the_stream_has_no_hole_that_is_not_said_and_ends_where_the_engine_is(steps in steps(), buffer in 1u64..20) {
        let mut world = World::new(buffer);
        for step in &steps {
            world.step(step);
        }
        world.settle();
    }
}

fn following(published: u64) -> World {
    let mut world = World::new(100);
    for _ in 0..published {
        world.publish();
    }
    world.settle();
    world
}

/// R15.
#[test]
fn a_new_engine_that_is_past_the_old_ones_number_is_not_taken_for_it() {
    let mut world = following(3);
    world.step(&Step::Restart(7));
    world.settle();
    assert_eq!((1, 0), (world.sequencer.counters.restarts, world.sequencer.counters.losses));
    assert_eq!(Some((2, 6)), world.last);
}

/// R15.
#[test]
fn a_new_engine_that_has_said_less_is_noticed_by_its_silence() {
    let mut world = following(3);
    world.step(&Step::Restart(0));
    world.settle();
    assert_eq!((1, None), (world.sequencer.counters.restarts, world.last));
}

/// R16.
#[test]
fn the_loss_of_the_last_batch_is_found_when_nothing_follows() {
    let mut world = following(2);
    world.publish();
    world.step(&Step::Lose);
    assert_eq!(Some((1, 1)), world.last);
    world.settle();
    assert_eq!((Some((1, 2)), 0), (world.last, world.sequencer.counters.losses));
}

/// R14, R15.
#[test]
fn what_the_engine_has_forgotten_is_said_to_be_lost() {
    let mut world = following(2);
    world.buffer = 3;
    for _ in 0..10 {
        world.publish();
        world.step(&Step::Lose);
    }
    world.settle();
    assert_eq!((1, 0), (world.sequencer.counters.losses, world.sequencer.counters.restarts));
}

/// R17.
#[test]
fn a_loss_is_said_when_nobody_answers_and_the_stream_goes_on() {
    let mut world = following(2);
    world.publish();
    world.step(&Step::Lose);
    world.publish();
    world.step(&Step::Deliver);
    world.step(&Step::FailAnswer);
    assert!(world.sequencer.has_kept());
    world.step(&Step::GiveUp);
    assert_eq!((Some((1, 3)), 1), (world.last, world.sequencer.counters.losses));
    // Without news nothing is given up.
    world.step(&Step::Idle);
    world.step(&Step::GiveUp);
    assert_eq!(1, world.sequencer.counters.losses);
    world.settle();
}

#[test]
fn what_is_kept_is_bounded_and_what_is_dropped_comes_with_the_next_answer() {
    let mut world = following(1);
    world.step(&Step::Idle);
    for _ in 0..20 {
        world.publish();
        world.step(&Step::Deliver);
    }
    assert_eq!(14, world.sequencer.counters.dropped_batches);
    world.settle();
    assert_eq!((Some((1, 20)), 0), (world.last, world.sequencer.counters.losses));
}
