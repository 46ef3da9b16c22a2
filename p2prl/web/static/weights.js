// The page on weights: versions and their sizes, who holds what, transfer rates against the caps.
import { html, nothing } from './vendor/lit-html.js';
import { bytes, short, time } from './words.js';

const row = (name, value) => html`<dt>${name}</dt><dd>${value}</dd>`;
const share = (part, whole) => {
  const percent = (100 * part) / whole;
  return whole ? `${percent < 10 ? percent.toFixed(2) : Math.round(percent)} %` : '-';
};

export function weights(state, plots) {
  const report = state.weights;
  if (!report) return html`<h1>Weights</h1><p>Asking the node.</p>`;
  const names = new Map(state.peers.map((peer) => [peer.peer_id, peer.name]));
  return html`<h1>Weights</h1><div class="cards">${lines(state.status.rates)}${disk(report)}</div>${fetches(state.status.fetches)}${plots}
    ${versions(report, names)}${holders(report, state.peers)}`;
}

/** A rate, and its cap where there is one: as words and as a bar. */
function line(name, rate, cap) {
  if (cap === null || cap === undefined) return row(name, `${bytes(rate)}/s, no cap`);
  return row(name, html`${bytes(rate)}/s of ${bytes(cap)}/s
    <meter min="0" max=${cap} value=${Math.min(rate, cap)} aria-label="${name}, share of the cap">${share(rate, cap)}</meter>`);
}

function lines(rates) {
  return html`<section><h2>Transfer</h2><dl>${line('up', rates.up_bytes_per_s, rates.up_cap_bytes_per_s)}
    ${line('down', rates.down_bytes_per_s, rates.down_cap_bytes_per_s)}</dl>
    <p class="dim">All traffic with peers; weights are most of it.</p></section>`;
}

function disk(report) {
  return html`<section><h2>Here</h2><dl>${row('newest version', html`<code>${report.head}</code>`)}
    ${row('on disk', html`${bytes(report.held_bytes)} of ${bytes(report.budget_bytes)}
      <meter min="0" max=${report.budget_bytes} value=${Math.min(report.held_bytes, report.budget_bytes)}
        aria-label="on disk, share of the budget">${share(report.held_bytes, report.budget_bytes)}</meter>`)}
    ${report.awaited ? row('on the way to', awaited(report.awaited)) : nothing}
    ${row('base model', bytes(report.full_bytes))}
    ${row('peers up to date', `${report.newest} of ${report.num_peers}`)}</dl></section>`;
}

/** A better version than ours: what of the files that lead to it is here. */
function awaited(each) {
  return html`<code>${each.version}</code>, ${each.whole_files} of ${each.num_files} files whole, ${bytes(each.here_bytes)} of ${bytes(each.num_bytes)}
    <meter min="0" max=${each.num_bytes} value=${each.here_bytes} aria-label="here of what is on the way">${share(each.here_bytes, each.num_bytes)}</meter>`;
}

/** What comes in now; nothing where nothing does. */
function fetches(running) {
  if (!running?.length) return nothing;
  return html`<section class="scroll"><h2>Coming in</h2><table id="fetches">
    <thead><tr><th scope="col">Version</th><th scope="col">As</th><th scope="col" class="num">Verified</th>
      <th scope="col" class="num">Rate</th><th scope="col" class="num">From</th></tr></thead>
    <tbody>${running.map((each) => html`<tr><td><code>${each.version}</code></td><td>${each.kind}</td>
      <td class="num">${bytes(each.num_bytes)} of ${bytes(each.of_bytes)}
        <meter min="0" max=${each.of_bytes} value=${each.num_bytes} aria-label="verified">${share(each.num_bytes, each.of_bytes)}</meter></td>
      <td class="num">${bytes(each.bytes_per_s)}/s</td>
      <td class="num">${each.num_peers} ${each.num_peers === 1 ? 'peer' : 'peers'}</td></tr>`)}</tbody></table></section>`;
}

function way(each, full) {
  const from = each.kind === 'delta' ? ` from ${each.base_step}` : '';
  return html`<div>${each.kind}${from}: ${bytes(each.num_bytes)}, ${share(each.num_bytes, full)} ${each.held ? nothing : html`<span class="dim">(not here)</span>`}</div>`;
}

const forms = (each) => [each.state_bytes ? 'state' : '', each.ways.some((one) => one.held && one.kind === 'delta') ? 'delta' : '']
  .filter(Boolean).join(' and ') || '-';

function versions(report, names) {
  return html`<section class="scroll"><h2>Versions</h2><table id="versions">
    <caption class="dim">Ways to get a version, with their share of the base model's bytes; what of it is on this disk, and why.</caption>
    <thead><tr><th scope="col" class="num">Step</th><th scope="col">Version</th><th scope="col">Published</th>
      <th scope="col">Ways</th><th scope="col" class="num">Here</th><th scope="col">As</th><th scope="col">Why</th>
      <th scope="col">Newest of</th></tr></thead>
    <tbody>${report.versions.map((each, number) => html`<tr class=${number ? nothing : 'newest'}><td class="num">${each.step}</td>
      <td><code>${each.version}</code></td><td>${time(each.published_at * 1000)}</td>
      <td>${each.ways.map((one) => way(one, report.full_bytes))}</td>
      <td class="num">${each.held_bytes ? bytes(each.held_bytes) : '-'}</td>
      <td>${forms(each)}</td><td>${each.kept || '-'}</td>
      <td class="text">${each.holders.map((peer) => names.get(peer) || short(peer)).join(', ')}</td></tr>`)}</tbody></table>
    ${report.versions.length ? nothing : html`<p>No version yet: all work with the base model.</p>`}</section>`;
}

function holders(report, peers) {
  const step = Number(report.head.split('.')[1]);
  return html`<section class="scroll"><h2>Who holds what</h2><table id="holders">
    <thead><tr><th scope="col">Peer</th><th scope="col">Name</th><th scope="col">Newest version</th><th scope="col" class="num">Behind</th>
      <th scope="col" class="num">Received from it</th><th scope="col" class="num">Sent to it</th></tr></thead>
    <tbody>${peers.filter((peer) => peer.version).map((peer) => html`<tr><td><code title=${peer.peer_id}>${short(peer.peer_id)}</code></td>
      <td class="text">${peer.name}</td><td><code>${peer.version}</code></td><td class="num">${Math.max(0, step - peer.step)}</td>
      <td class="num">${bytes(peer.received_bytes)}</td><td class="num">${bytes(peer.sent_bytes)}</td></tr>`)}</tbody></table></section>`;
}
