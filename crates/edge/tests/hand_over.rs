//! Requests that are divided between prefill and decode workers, and everything that can go wrong between the two.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use kvist_edge::RouterProcess;
use kvist_errors::{Code, KvistError, from_status};
use kvist_proto::{
    controller::v1::Model,
    engine::v1::{AbortReason, HandOver, Role, StopConditions, TokenIds},
    events::v1::DecisionRecord,
    router::v1::{
        self as wire, explain_request::Subject, generate_response::Event, prompt::Form,
        router_service_client::RouterServiceClient,
    },
};
use kvist_router::RouterSettings;
use kvist_worker::{HandOverSettings, SimWorkerSettings, TransferFailurePolicy, TransferFault};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use support::*;
use tonic::{Streaming, transport::Channel};

/// Prompts from here on are divided.
const FROM_TOKENS: u32 = 64;

fn quick() -> SimWorkerSettings {
    SimWorkerSettings {
        decode_step_ms: 0.5,
        prefill_tokens_per_second: 1e6,
        transfer_timeout_ms: 200,
        ..SimWorkerSettings::default()
    }
}

async fn prefill(number: usize, sim: SimWorkerSettings, lease_ms: u64) -> TestWorker {
    let hand_over = HandOverSettings { lease_ms, ..HandOverSettings::default() };
    TestWorker::start_sim_half(number, sim, Role::Prefill, hand_over).await
}

async fn decode(number: usize, sim: SimWorkerSettings) -> TestWorker {
    TestWorker::start_sim_half(number, sim, Role::Decode, HandOverSettings::default()).await
}

fn state(revision: u64, workers: &[&TestWorker]) -> Vec<u8> {
    let hand_over = Some(HandOver { prefill_from_tokens: FROM_TOKENS, ..HandOver::default() });
    cluster_state_with(revision, workers, Model { hand_over, ..Model::default() })
}

/// A router of its own name: workers end the older of two connections of one router.
#[derive(Clone)]
struct Mesh {
    name: String,
    router: Arc<RouterProcess>,
    client: RouterServiceClient<Channel>,
}

impl Mesh {
    async fn start(workers: &[&TestWorker]) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("r{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let router = RouterProcess::start(RouterSettings { name: name.clone(), ..settings() }).await.unwrap();
        assert!(router.apply_cluster_state(&state(1, workers)).unwrap());
        let count = u32::try_from(workers.len()).unwrap();
        until("all targets are ready", || router.status().ready_targets == count).await;
        let address = format!("http://{}", router.addresses().grpc_address);
        let channel = limited(Channel::from_shared(address).unwrap().connect()).await.unwrap();
        Self { name, router: Arc::new(router), client: RouterServiceClient::new(channel) }
    }

    async fn ask(&self, id: &str, prompt: &[u32], max_tokens: u32) -> Streaming<wire::GenerateResponse> {
        self.try_ask(id, prompt, max_tokens).await.unwrap()
    }

    async fn try_ask(
        &self,
        id: &str,
        prompt: &[u32],
        max_tokens: u32,
    ) -> Result<Streaming<wire::GenerateResponse>, KvistError> {
        let request = wire::GenerateRequest {
            model: MODEL.to_owned(),
            prompt: Some(wire::Prompt { form: Some(Form::Tokens(TokenIds { ids: prompt.to_vec() })) }),
            request_id: id.to_owned(),
            stop: Some(StopConditions { max_tokens: Some(max_tokens), ..StopConditions::default() }),
            return_token_ids: true,
            ..wire::GenerateRequest::default()
        };
        let response = limited(self.client.clone().generate(request)).await;
        response.map(tonic::Response::into_inner).map_err(|status| from_status(&status))
    }

    /// The tokens of an answer, and its end.
    async fn answer(
        &self,
        id: &str,
        prompt: &[u32],
        max_tokens: u32,
    ) -> Result<(Vec<u32>, wire::GenerateFinished), KvistError> {
        read_answer(self.try_ask(id, prompt, max_tokens).await?).await
    }

    /// A request's id as workers see it.
    fn id(&self, id: &str) -> String {
        format!("{}-{id}", self.name)
    }

    async fn explain(&self, id: &str) -> Vec<DecisionRecord> {
        let subject = Some(Subject::RequestId(self.id(id)));
        limited(self.client.clone().explain(wire::ExplainRequest { subject })).await.unwrap().into_inner().decisions
    }

    async fn metric(&self, line: &str) {
        let deadline = tokio::time::Instant::now() + TIME_LIMIT;
        loop {
            let text = read(send(self.router.addresses().admin_address, get("/metrics")).await).await.body;
            if text.lines().any(|one| one == line) {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "{line} in {text}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn pinned(&self) -> u64 {
        let targets = self.client.clone().list_targets(wire::ListTargetsRequest {}).await.unwrap().into_inner().targets;
        targets.into_iter().filter_map(|target| target.load).map(|load| load.pinned_blocks).sum()
    }

    /// Nothing runs, nothing is promised, nothing is kept.
    async fn is_clean(&self) {
        let core = self.router.core();
        until("nothing is left", || core.active_requests() == 0 && core.open_reservations() == 0).await;
        let waiting = async {
            while self.pinned().await > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("blocks stay pinned");
    }
}

async fn read_answer(
    mut stream: Streaming<wire::GenerateResponse>,
) -> Result<(Vec<u32>, wire::GenerateFinished), KvistError> {
    let mut tokens = Vec::new();
    loop {
        let message = limited(stream.message()).await.map_err(|status| from_status(&status))?;
        match message.expect("an end").event {
            Some(Event::Delta(delta)) => tokens.extend(delta.token_ids),
            Some(Event::Finished(end)) => return Ok((tokens, end)),
            other => panic!("{other:?}"),
        }
    }
}

fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|position| 40 + (seed * 31 + position * 7) % 60).collect()
}

fn is_released(seen: &Seen, id: &str) -> bool {
    matches!(seen, Seen::Released(lease) if lease.contains(&format!("-{id}.")))
}

/// What a scripted prefill worker sees, until the lease of a request is released.
async fn seen_until_released(worker: &mut TestWorker, id: &str) -> Vec<Seen> {
    let mut all = Vec::new();
    loop {
        let seen = worker.next().await;
        if is_released(&seen, id) {
            return all;
        }
        all.push(seen);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pair_answers_as_one_engine_does_and_both_decisions_can_be_explained() {
    let (first, second) = (prefill(0, quick(), 3_600_000).await, decode(1, quick()).await);
    let alone = TestWorker::start_sim(2, quick()).await;
    let whole = Mesh::start(&[&alone]).await.answer("w", &prompt(1, 200), 9).await.unwrap().0;
    let mesh = Mesh::start(&[&first, &second]).await;
    // What would be done, without doing it.
    let asked = Some(wire::Prompt { form: Some(Form::Tokens(TokenIds { ids: prompt(1, 200) })) });
    let run = wire::DryRun { model: MODEL.to_owned(), prompt: asked, ..wire::DryRun::default() };
    let request = wire::ExplainRequest { subject: Some(Subject::DryRun(run)) };
    let planned = limited(mesh.client.clone().explain(request)).await.unwrap().into_inner().decisions;
    let planned: Vec<_> = planned.into_iter().map(|one| one.round).collect();
    assert_eq!((vec!["prefill".to_owned(), "decode".to_owned()], 0), (planned, mesh.router.core().open_reservations()));
    let (tokens, end) = mesh.answer("a", &prompt(1, 200), 9).await.unwrap();
    assert_eq!(whole, tokens);
    let usage = end.usage.unwrap();
    // Nobody had it in a cache, so none of it is called cached.
    assert_eq!((200, 9, 0), (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens));
    assert_eq!(192, end.receipt.unwrap().external_tokens);
    mesh.is_clean().await;
    let explained = mesh.explain("a").await;
    let seen: Vec<_> = explained.iter().map(|one| (one.round.as_str(), one.outcome.as_str(), one.attempt)).collect();
    assert_eq!(vec![("prefill", "handed_over", 1), ("decode", "length", 1)], seen);
    let chosen =
        |record: &DecisionRecord| record.candidates[record.chosen_candidate.unwrap() as usize].worker_uid.clone();
    assert_eq!(("worker-0", "worker-1"), (chosen(&explained[0]).as_str(), chosen(&explained[1]).as_str()));
    assert_eq!(
        (1, 9),
        (explained[0].receipt.unwrap().completion_tokens, explained[1].receipt.unwrap().completion_tokens)
    );
    // A second time the decode worker has all of it: nothing is divided.
    let (again, end) = mesh.answer("b", &prompt(1, 200), 9).await.unwrap();
    assert_eq!((tokens, 192), (again, end.usage.unwrap().cached_tokens));
    let explained = mesh.explain("b").await;
    assert_eq!((1, "short"), (explained.len(), explained[0].local_prefill_reason.as_str()));
    assert!(explained[0].candidates.iter().any(|one| one.filtered_reason == "role"));
    mesh.metric("kvist_router_hand_overs_total{outcome=\"completed\"} 1").await;
    mesh.metric("kvist_router_hand_overs_total{outcome=\"short\"} 1").await;
    mesh.metric("kvist_router_hand_over_seconds_count 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_other_half_the_decode_worker_does_it_all_and_a_prefill_worker_alone_does_nothing() {
    let (mut first, second) = (prefill(0, quick(), 3_600_000).await, decode(1, quick()).await);
    let mesh = Mesh::start(&[&second]).await;
    assert_eq!(3, mesh.answer("a", &prompt(1, 200), 3).await.unwrap().0.len());
    assert_eq!("", mesh.explain("a").await[0].local_prefill_reason);
    // Of another group.
    first.group = "other".to_owned();
    let mesh = Mesh::start(&[&first, &second]).await;
    assert_eq!(3, mesh.answer("b", &prompt(2, 200), 3).await.unwrap().0.len());
    assert_eq!("no_pair", mesh.explain("b").await[0].local_prefill_reason);
    let mesh = Mesh::start(&[&first]).await;
    let error = mesh.answer("c", &prompt(3, 200), 3).await.unwrap_err();
    assert_eq!(Code::NoReadyTarget, error.code);
    assert!(error.message.contains("no decode worker"), "{}", error.message);
    mesh.metric("kvist_router_selections_total{outcome=\"no_matching_decode\"} 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_that_dies_is_replaced_by_the_decode_worker() {
    let mut first = TestWorker::start_half(0, Script::Hold(""), Role::Prefill).await;
    let second = decode(1, quick()).await;
    let mesh = Mesh::start(&[&first, &second]).await;
    let stream = mesh.ask("a", &prompt(1, 200), 3).await;
    assert!(matches!(first.next().await, Seen::Submitted(_)));
    first.kill();
    let (tokens, _) = read_answer(stream).await.unwrap();
    assert_eq!(3, tokens.len());
    let seen: Vec<_> = mesh.explain("a").await.into_iter().map(|one| (one.round, one.outcome)).collect();
    let expected = [("prefill", "ENGINE_LOST"), ("decode", "not_begun"), ("", "length")];
    assert_eq!(expected.map(|(round, outcome)| (round.to_owned(), outcome.to_owned())).to_vec(), seen);
    mesh.is_clean().await;
    mesh.metric("kvist_router_hand_overs_total{outcome=\"prefill_failed\"} 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_whose_engine_has_died_is_computed_again_or_is_one_clear_error() {
    let first = TestWorker::start_half(0, Script::Keep, Role::Prefill).await;
    for (policy, number) in [(TransferFailurePolicy::Recompute, 1), (TransferFailurePolicy::Fail, 2)] {
        let hand_over = HandOverSettings { on_failure: policy, ..HandOverSettings::default() };
        let second = TestWorker::start_sim_half(number, quick(), Role::Decode, hand_over).await;
        let mesh = Mesh::start(&[&first, &second]).await;
        let answer = mesh.answer("a", &prompt(1, 200), 3).await;
        match policy {
            TransferFailurePolicy::Recompute => assert_eq!(3, answer.unwrap().0.len()),
            TransferFailurePolicy::Fail => assert_eq!(Code::KvTransferFailed, answer.unwrap_err().code),
        }
        mesh.is_clean().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_that_refuses_or_dies_is_replaced_and_nothing_stays_kept() {
    let first = prefill(0, quick(), 3_600_000).await;
    let mut refusing = TestWorker::start_half(1, Script::Fail(Code::Draining, true), Role::Decode).await;
    let mesh = Mesh::start(&[&first, &refusing]).await;
    // There is nobody else: one error, and no lease.
    assert_eq!(Code::Draining, mesh.answer("a", &prompt(1, 200), 3).await.unwrap_err().code);
    mesh.is_clean().await;
    mesh.metric("kvist_router_hand_overs_total{outcome=\"decode_failed\"} 1").await;
    assert!(matches!(refusing.next().await, Seen::Submitted(_)));
    let other = decode(2, quick()).await;
    let mesh = Mesh::start(&[&first, &refusing, &other]).await;
    for number in 0..6 {
        let (tokens, _) = mesh.answer(&format!("b-{number}"), &prompt(10 + number, 200), 3).await.unwrap();
        assert_eq!(3, tokens.len());
    }
    mesh.is_clean().await;
    // It dies before it has said anything.
    let mut dying = TestWorker::start_half(3, Script::Hold(""), Role::Decode).await;
    let mesh = Mesh::start(&[&first, &dying]).await;
    let stream = mesh.ask("c", &prompt(20, 200), 3).await;
    assert!(matches!(dying.next().await, Seen::Submitted(_)));
    assert!(mesh.router.apply_cluster_state(&state(2, &[&first, &dying, &other])).unwrap());
    until("the other one can take it", || mesh.router.status().ready_targets == 3).await;
    dying.kill();
    assert_eq!(3, read_answer(stream).await.unwrap().0.len());
    mesh.is_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_that_dies_in_the_middle_ends_the_stream_with_an_error() {
    let first = prefill(0, quick(), 3_600_000).await;
    let mut second = TestWorker::start_half(1, Script::Hold("begun"), Role::Decode).await;
    let mesh = Mesh::start(&[&first, &second]).await;
    let mut stream = mesh.ask("a", &prompt(1, 200), 9).await;
    assert!(limited(stream.message()).await.unwrap().is_some());
    // It has the KV when it speaks.
    let freed = async {
        while mesh.pinned().await > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    limited(freed).await;
    second.kill();
    assert_eq!(Code::EngineLost, read_answer(stream).await.unwrap_err().code);
    mesh.is_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_ends_both_halves_whenever_it_leaves() {
    // While the prompt is computed.
    let mut first = TestWorker::start_half(0, Script::Hold(""), Role::Prefill).await;
    let mut second = TestWorker::start_half(1, Script::Hold(""), Role::Decode).await;
    let mesh = Mesh::start(&[&first, &second]).await;
    let stream = mesh.ask("a", &prompt(1, 200), 9).await;
    let submitted = first.next().await;
    assert!(matches!(submitted, Seen::Submitted(_)), "{submitted:?}");
    drop(stream);
    let seen = seen_until_released(&mut first, "a").await;
    assert_eq!(vec![Seen::Aborted(mesh.id("a"), AbortReason::Cancelled)], seen);
    // Between the end of the prefill and the first token.
    first.engine.script(Script::Keep);
    let stream = mesh.ask("b", &prompt(2, 200), 9).await;
    assert!(matches!(second.next().await, Seen::Submitted(_)));
    drop(stream);
    assert_eq!(Seen::Aborted(mesh.id("b"), AbortReason::Cancelled), second.next().await);
    seen_until_released(&mut first, "b").await;
    // While the answer is generated.
    second.engine.script(Script::Hold("begun"));
    let mut stream = mesh.ask("c", &prompt(3, 200), 9).await;
    assert!(limited(stream.message()).await.unwrap().is_some());
    seen_until_released(&mut first, "c").await;
    assert!(matches!(second.next().await, Seen::Submitted(_)));
    drop(stream);
    assert_eq!(Seen::Aborted(mesh.id("c"), AbortReason::Cancelled), second.next().await);
    mesh.is_clean().await;
    mesh.metric("kvist_router_hand_overs_total{outcome=\"cancelled\"} 2").await;
    // What each half was asked.
    let asked = first.engine.requests.lock().last().unwrap().clone();
    assert_eq!((Some(1), true), (asked.stop.as_ref().unwrap().max_tokens, asked.stop.unwrap().ignore_eos));
    let told = second.engine.requests.lock().last().unwrap().clone();
    assert_eq!((Some(9), Some(200)), (told.stop.unwrap().max_tokens, told.expected_cached_tokens));
    assert_eq!(asked.kv_transfer.unwrap().lease_id, told.kv_transfer.unwrap().lease_id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_both_halves() {
    let mut first = TestWorker::start_half(0, Script::Hold(""), Role::Prefill).await;
    let mut second = TestWorker::start_half(1, Script::Hold(""), Role::Decode).await;
    let mesh = Mesh::start(&[&first, &second]).await;
    for (script, id) in [(Script::Hold(""), "a"), (Script::Keep, "b")] {
        first.engine.script(script);
        let mut request = tonic::Request::new(wire::GenerateRequest {
            model: MODEL.to_owned(),
            prompt: Some(wire::Prompt { form: Some(Form::Tokens(TokenIds { ids: prompt(1, 200) })) }),
            request_id: id.to_owned(),
            ..wire::GenerateRequest::default()
        });
        request.metadata_mut().insert("grpc-timeout", "300m".parse().unwrap());
        let stream = limited(mesh.client.clone().generate(request)).await;
        if let Ok(stream) = stream {
            assert!(read_answer(stream.into_inner()).await.is_err());
        }
        seen_until_released(&mut first, id).await;
    }
    assert!(matches!(second.next().await, Seen::Submitted(_)));
    assert!(matches!(second.next().await, Seen::Aborted(_, _)));
    mesh.is_clean().await;
}

/// Whatever happens when to whom, nothing stays promised or pinned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_any_order_of_answers_losses_and_clients_that_leave_nothing_stays_pinned() {
    let faulty = |transfer_fault| SimWorkerSettings { transfer_fault, ..quick() };
    let workers = [
        prefill(0, quick(), 2_000).await,
        prefill(1, faulty(TransferFault::Refuse), 2_000).await,
        prefill(2, faulty(TransferFault::WrongBlocks), 2_000).await,
        prefill(3, faulty(TransferFault::Stall), 2_000).await,
        prefill(4, faulty(TransferFault::Break), 2_000).await,
        decode(5, quick()).await,
        decode(6, SimWorkerSettings { transfer_tokens_per_second: 20_000.0, ..quick() }).await,
    ];
    let mesh = Mesh::start(&workers.iter().collect::<Vec<_>>()).await;
    let mut asking = tokio::task::JoinSet::new();
    for seed in 0..12u64 {
        let mesh = mesh.clone();
        asking.spawn(async move {
            let mut chance = StdRng::seed_from_u64(seed);
            for number in 0..20 {
                let tokens = prompt(chance.random_range(0..1000), chance.random_range(1..600));
                let stream = mesh.ask(&format!("{seed}-{number}"), &tokens, chance.random_range(1..20)).await;
                if chance.random_bool(0.4) {
                    let patience = Duration::from_micros(chance.random_range(0..40_000));
                    let _ = tokio::time::timeout(patience, read_answer(stream)).await;
                } else {
                    read_answer(stream).await.unwrap();
                }
            }
        });
    }
    while let Some(asked) = asking.join_next().await {
        asked.unwrap();
    }
    mesh.is_clean().await;
}
