// The page: one EventSource, one state object, one render. Text of peers goes through lit-html's text bindings only.
import { html, nothing, render } from './vendor/lit-html.js';
import { seconds, bytes, number, short, time, duration } from './words.js';
import { draw, forget } from './plots.js';
import { weights } from './weights.js';

const PAGES = { overview: 'Overview', peers: 'Peers', training: 'Training', weights: 'Weights', logs: 'Logs' };
const OVERVIEW = [['Reward', ['reward', 'eval_reward']], ['Version (step)', ['version']],
  ['Tokens per second', ['tokens_per_s']], ['Age of training data, versions', ['staleness_p50', 'staleness_p95']]];
const TRAINING = [['Reward', ['reward', 'eval_reward']], ['Loss', ['loss']],
  ['Effective sample size, ratio', ['ess_ratio', 'ess_ratio_weights']], ['Learning rate, multiplier', ['lr_multiplier']],
  ['Gradient norm before clipping', ['grad_norm']], ['Divergence from the sampler, a token', ['kl']],
  ['Entropy, a token', ['entropy']], ['Clipped, share', ['clip_fraction', 'clip_fraction_fresh']]];
const WEIGHTS = [['Bytes per second', ['up_bytes_per_s', 'down_bytes_per_s']], ['Version (step)', ['version']]];
const PLOTS = { overview: OVERVIEW, training: TRAINING, weights: WEIGHTS };
const WINDOWS = { '15 minutes': 900, '6 hours': 21600, '7 days': 604800 };
const MAX_LOGS = 500;
const MAX_STEPS = 50;
const RETRY_MS = 3000;
const REFRESH_MS = 5000;

const state = { status: null, peers: [], steps: [], logs: [], recipe: null, weights: null, series: {}, problem: '',
  page: 'overview', window: 900, level: 'info', text: '', follow: true };
let source = null;
let retry = 0;
let frame = 0;

// -- talking to the daemon --------------------------------------------------------------------------------------------
async function get(path) {
  const reply = await fetch(path, { headers: { Accept: 'application/json' } });
  if (reply.status === 401) throw new Error('login');
  if (!reply.ok) throw new Error('HTTP ' + reply.status);
  return reply.json();
}

async function login() {
  const code = location.hash.slice(1);
  history.replaceState(null, '', '/#overview');
  const reply = await fetch('/login', { method: 'POST', body: JSON.stringify({ code }) });
  if (reply.ok) return;
  const { error } = await reply.json();
  show({ problem: `${error.message}. ${error.hint}` });
  throw new Error('login');
}

async function refetch() {
  const [status, peers, steps, logs, recipe] = await Promise.all(['/api/v1/status', '/api/v1/peers',
    `/api/v1/steps?limit=${MAX_STEPS}`, `/api/v1/logs?limit=${MAX_LOGS}`, '/api/v1/recipe'].map(get));
  show({ status, peers, steps, logs, recipe, problem: '' });
  await refresh();
}

async function refresh() {
  if (document.hidden || state.problem) return;
  const names = [...new Set((PLOTS[state.page] ?? []).flatMap(([, each]) => each))];
  if (names.length) show({ series: await get(`/api/v1/series?name=${names}&since_s=${state.window}&points=600`) });
  if (state.page === 'peers') show({ peers: await get('/api/v1/peers') });
  if (state.page === 'weights') {
    const [found, known] = await Promise.all(['/api/v1/weights', '/api/v1/peers'].map(get));
    show({ weights: found, peers: known });
  }
}

function follow() {
  if (source || document.hidden) return;
  source = new EventSource('/api/v1/events');
  source.onopen = () => refetch().catch(lost);
  source.onerror = () => lost(new Error('gone'));
  source.addEventListener('status', (event) => show({ status: JSON.parse(event.data), problem: '' }));
  source.addEventListener('step', (event) => {
    state.steps = [...state.steps, JSON.parse(event.data)].slice(-MAX_STEPS);
    show({});
  });
  source.addEventListener('log', (event) => {
    state.logs = [...state.logs, JSON.parse(event.data)].slice(-MAX_LOGS);
    show({});
  });
  source.addEventListener('peer', () => get('/api/v1/peers').then((peers) => show({ peers }), lost));
  source.addEventListener('reset', () => refetch().catch(lost));
}

function leave() {
  source?.close();
  source = null;
  clearTimeout(retry);
}

async function lost(error) {
  leave();
  let problem = 'The daemon is gone; retrying. What is below is old.';
  if (error.message === 'login') problem = 'Not logged in. Run "p2prl web" on this machine and open the address it prints.';
  else await get('/api/v1/status').catch((other) => {
    if (other.message === 'login') problem = 'Not logged in. Run "p2prl web" on this machine and open the address it prints.';
  });
  show({ problem });
  clearTimeout(retry);
  retry = setTimeout(follow, RETRY_MS);
}

// -- drawing ----------------------------------------------------------------------------------------------------------
function show(change) {
  Object.assign(state, change);
  frame ||= requestAnimationFrame(paint);
}

function paint() {
  frame = 0;
  render(head(), document.getElementById('head'));
  render(state.problem ? state.problem : nothing, document.getElementById('banner'));
  const main = document.getElementById('main');
  if (!state.status) {
    if (state.problem) main.textContent = '';
    return;
  }
  if (!main.dataset.page) main.textContent = '';
  if (main.dataset.page !== state.page) forget();
  main.dataset.page = state.page;
  main.classList.toggle('stale', Boolean(state.problem));
  render({ overview, peers, training, logs, weights: () => weights(state, plots(WEIGHTS)) }[state.page](), main);
  document.title = `p2prl ${state.status.node.name}`;
  for (const [title, names] of PLOTS[state.page] ?? []) {
    draw(document.getElementById(plotId(title)), title, names, state.series);
  }
  if (state.page === 'logs' && state.follow) document.querySelector('.log').scrollTop = 1e9;
}

const plotId = (title) => 'plot-' + title.toLowerCase().replace(/[^a-z]+/g, '-');

function head() {
  const node = state.status?.node;
  return html`<strong>p2prl</strong>
    ${node ? html`<span id="name">${node.name}</span> <code class="dim" title=${node.peer_id}>${short(node.peer_id)}</code>` : nothing}
    ${state.status ? html`<span class="dim">swarm ${state.status.swarm.recipe} ${state.status.swarm.id.slice(0, 8)}</span>` : nothing}
    <nav aria-label="Pages">${Object.entries(PAGES).map(([page, title]) => html`
      <a href="#${page}" aria-current=${page === state.page ? 'page' : nothing}>${title}</a>`)}</nav>`;
}

const row = (name, value) => html`<dt>${name}</dt><dd>${value}</dd>`;
const colour = { working: 'ok', degraded: 'bad', stopping: 'warn', draining: 'warn', paused: 'warn' };

function overview() {
  const { node, swarm, state: now, policy, rates, given, training: train, health } = state.status;
  return html`<h1>Overview</h1><div class="cards">
    <section><h2>State</h2><p role="status"><span id="state" class="badge ${colour[now.now] ?? 'warn'}">${now.now}</span>
        ${now.reasons.map((reason) => reason.replaceAll('_', ' ')).join(', ')} ${now.until ? `until ${time(now.until)}` : ''}</p>
      <dl>${row('role', `${node.role}, ${swarm.role}`)}${row('version', `${policy.version} (${policy.behind} behind)`)}
        ${row('peers', `${swarm.peers_alive} (${swarm.peers_relayed} relayed)${swarm.reachability === 'unknown' ? '' : ', ' + swarm.reachability}`)}
        ${row('up', html`${duration(node.started_at)}`)}
        ${row('traffic', `up ${bytes(rates.up_bytes_per_s)}/s, down ${bytes(rates.down_bytes_per_s)}/s`)}
        ${row('generating', `${number(rates.rollout_tokens_per_s)} tokens/s`)}</dl></section>
    <section><h2>You gave</h2><dl>${row('groups', `${given.groups}, ${given.admitted} admitted, ${given.waiting} waiting`)}
        ${row('refused', Object.entries(given.refused).map(([why, n]) => `${n} ${why.replaceAll('_', ' ')}`).join(', ') || 'none')}
        ${row('tokens', given.tokens.toLocaleString())}${row('sent', bytes(given.sent_bytes))}
        ${row('reward', `${number(train.reward_mean)} (first ${number(train.reward_first)}, last ${number(train.reward_last)})`)}
        ${row('held-out reward', `${number(train.eval_reward)} ${train.eval_version ? `at ${train.eval_version}` : ''}`)}</dl></section>
    <section><h2>Health</h2>${health.length ? html`<ul class="health">${health.map((item) => html`<li>
        <strong class=${item.level === 'error' ? 'bad' : 'warn'}>${item.level}:</strong> ${item.message}
        ${item.fix ? html`<br><span class="dim">To do: ${item.fix}</span>` : nothing}</li>`)}</ul>`
      : html`<p class="ok">No complaints.</p>`}</section></div>${plots(OVERVIEW)}`;
}

function plots(list) {
  return html`<form><label>Window <select id="window" @change=${(event) => { show({ window: Number(event.target.value) }); refresh().catch(lost); }}>
      ${Object.entries(WINDOWS).map(([name, s]) => html`<option value=${s} ?selected=${s === state.window}>${name}</option>`)}
    </select></label></form>
    <div class="cards">${list.map(([title]) => html`<section><h2>${title}</h2>
      <div class="plot" id=${plotId(title)} role="img" aria-label="${title} over time"></div></section>`)}</div>`;
}

function peers() {
  return html`<h1>Peers</h1><section class="scroll"><table><caption class="dim">Names are the peers' own words.</caption>
    <thead><tr><th scope="col">Peer</th><th scope="col">Name</th><th scope="col">Role</th><th scope="col">Path</th>
      <th scope="col" class="num">Round trip</th><th scope="col">Version</th><th scope="col" class="num">Groups</th>
      <th scope="col" class="num">Refused</th><th scope="col" class="num">Trust</th><th scope="col" class="num">Faults</th><th scope="col" class="num">Received</th><th scope="col" class="num">Sent</th>
      <th scope="col">Seen</th></tr></thead>
    <tbody>${state.peers.map((peer) => html`<tr><td><code title=${peer.peer_id}>${short(peer.peer_id)}</code></td>
      <td class="text">${peer.name}</td><td>${peer.role}${peer.leader ? ', leader' : ''}</td><td>${peer.path}</td>
      <td class="num">${peer.rtt_s === null ? '-' : seconds(peer.rtt_s)}</td><td><code>${peer.version}</code></td>
      <td class="num">${peer.groups}</td><td class="num">${peer.refused}</td>
      <td class="num">${peer.quarantined ? html`<span class="bad">quarantine</span>` : peer.trust.toFixed(2)}</td>
      <td class="num">${peer.faults}</td><td class="num">${bytes(peer.received_bytes)}</td>
      <td class="num">${bytes(peer.sent_bytes)}</td><td>${peer.seen_s < 2 ? 'now' : seconds(peer.seen_s)}</td></tr>`)}</tbody></table>
    ${state.peers.length ? nothing : html`<p>No peers yet.</p>`}</section>`;
}

function training() {
  const { swarm, training: train } = state.status;
  const sections = Object.entries(state.recipe ?? {}).filter(([, value]) => value && typeof value === 'object');
  return html`<h1>Training</h1><div class="cards"><section><h2>Now</h2><dl>${row('recipe', swarm.recipe)}
      ${row('step', train.step)}${row('newest version', swarm.policy_version)}${row('term', swarm.term)}
      ${row('leader', html`<code>${short(swarm.leader)}</code>`)}${row('groups trained on', train.num_groups)}
      ${row('groups waiting', train.buffered)}</dl></section>
    <section><h2>Recipe</h2>${sections.map(([name, values]) => html`<details><summary>${name}</summary>
      <dl>${Object.entries(values).map(([key, value]) => row(key, JSON.stringify(value)))}</dl></details>`)}</section></div>
    ${plots(TRAINING)}<section class="scroll"><h2>Last steps</h2><table><thead><tr><th scope="col" class="num">Step</th>
      <th scope="col">Version</th><th scope="col">Time</th><th scope="col" class="num">Reward</th><th scope="col" class="num">Loss</th>
      <th scope="col" class="num">ESS</th><th scope="col" class="num">Rate</th><th scope="col" class="num">Groups</th>
      <th scope="col" class="num">Took</th></tr></thead><tbody>${state.steps.toReversed().map((step) => html`<tr>
      <td class="num">${step.step}</td><td><code>${step.version}</code></td><td>${time(step.at * 1000)}</td>
      <td class="num">${number(step.reward_mean)}</td><td class="num">${number(step.metrics?.loss)}</td>
      <td class="num">${number(step.metrics?.ess_ratio)}</td><td class="num">${number(step.metrics?.lr_multiplier)}</td>
      <td class="num">${step.num_groups}</td><td class="num">${seconds(step.wall_s)}</td></tr>`)}</tbody></table></section>`;
}

function logs() {
  const levels = ['debug', 'info', 'warning', 'error', 'critical'];
  const lowest = levels.indexOf(state.level);
  const wanted = state.text.toLowerCase();
  const lines = state.logs.filter((line) => levels.indexOf(line.level) >= lowest).map((line) => [line, words(line)])
    .filter(([, text]) => text.toLowerCase().includes(wanted));
  return html`<h1>Logs</h1><form @submit=${(event) => event.preventDefault()}>
    <label>Level <select id="level" @change=${(event) => show({ level: event.target.value })}>${levels.map((level) => html`
      <option ?selected=${level === state.level}>${level}</option>`)}</select></label>
    <label>Filter <input id="filter" type="search" .value=${state.text} @input=${(event) => show({ text: event.target.value })}></label>
    <label><input type="checkbox" .checked=${state.follow} @change=${(event) => show({ follow: event.target.checked })}> follow</label></form>
    <section><ul class="log" tabindex="0" aria-label="Log lines">${lines.map(([line, text]) => html`<li
      class=${{ warning: 'warn', error: 'bad', critical: 'bad', debug: 'dim' }[line.level] ?? ''}>${text}</li>`)}</ul></section>`;
}

function words(line) {
  const values = Object.entries(line.values).map(([key, value]) => `${key}=${typeof value === 'number' ? number(value) : value}`);
  return `${time(line.t)} ${line.level.padEnd(8)} ${line.component.padEnd(10)} ${line.event}  ${values.join(' ')}`
    + (line.exc ? `  exc=${line.exc.split('\n').at(-1)}` : '');
}

// -- start ------------------------------------------------------------------------------------------------------------
function turn() {
  const page = location.hash.slice(1);
  show({ page: page in PAGES ? page : 'overview' });
  refresh().catch(lost);
}

async function start() {
  if (location.pathname === '/login' && location.hash.length > 1) await login();
  addEventListener('hashchange', turn);
  document.addEventListener('visibilitychange', () => (document.hidden ? leave() : follow()));
  setInterval(() => refresh().catch(lost), REFRESH_MS);
  turn();
  follow();
}

start().catch((error) => { if (!state.problem) show({ problem: error.message }); });
