const WORDS = {
  en: {
    sales: 'Sales', noSales: 'No sales at the moment.', loading: 'Loading…',
    logIn: 'Log in', logOut: 'Log out', phone: 'Mobile number', getCode: 'Get code', code: 'Code',
    codeSent: 'We have sent you a code.', solving: 'One moment…', demoCode: (code) => `Demo mode, your code is ${code}.`,
    loginFirst: 'Please log in first.',
    buy: 'Buy', buying: 'Buying…', bought: 'It is yours!', already: 'You already have it.',
    accepted: 'Accepted. Your order is being processed.', notBought: 'The order could not be completed.',
    retrying: (s) => `Busy. Trying again in ${s} s…`,
    worth: 'worth', left: (n, of) => `${n} of ${of} left`,
    begins: (time) => `Begins in ${time}`, ends: (time) => `Ends in ${time}`, days: (n) => `${n} d `,
    myOrders: 'My orders', noOrders: 'Nothing here yet.', aSale: (id) => `Sale ${id}`,
    cancel: 'Cancel', cancelled: 'The order is cancelled.', sure: 'Cancel this order?',
    unreachable: 'Cannot reach the server.', failed: 'Something went wrong.',
    state: {
      not_started: 'Soon', on: 'On now', sold_out: 'Sold out', paused: 'Paused', ended: 'Ended',
      pending: 'Processing', unpaid: 'Unpaid', paid: 'Paid', redeemed: 'Used', cancelled: 'Cancelled',
      refunding: 'Refunding', refunded: 'Refunded', rejected: 'Rejected',
    },
  },
  zh: {
    sales: '限时抢购', noSales: '暂无活动。', loading: '加载中…',
    logIn: '登录', logOut: '退出', phone: '手机号', getCode: '获取验证码', code: '验证码',
    codeSent: '验证码已发送。', solving: '请稍候…', demoCode: (code) => `演示模式，您的验证码是 ${code}。`,
    loginFirst: '请先登录。',
    buy: '抢购', buying: '抢购中…', bought: '抢到了！', already: '您已经抢到了。',
    accepted: '已受理，订单正在处理。', notBought: '订单未能完成。',
    retrying: (s) => `当前人多，${s} 秒后自动重试…`,
    worth: '价值', left: (n, of) => `剩余 ${n} / ${of}`,
    begins: (time) => `距开始 ${time}`, ends: (time) => `距结束 ${time}`, days: (n) => `${n} 天 `,
    myOrders: '我的订单', noOrders: '还没有订单。', aSale: (id) => `活动 ${id}`,
    cancel: '取消', cancelled: '订单已取消。', sure: '确定取消订单吗？',
    unreachable: '无法连接服务器。', failed: '出错了。',
    state: {
      not_started: '即将开始', on: '进行中', sold_out: '已抢光', paused: '已暂停', ended: '已结束',
      pending: '处理中', unpaid: '待支付', paid: '已支付', redeemed: '已使用', cancelled: '已取消',
      refunding: '退款中', refunded: '已退款', rejected: '未成功',
    },
  },
};

const POLL_MS = 2_000;
const POLL_MAX_MS = 10_000;
const TIMEOUT_MS = 10_000;
const BUY_RETRIES = 3;
const FOLLOW_TRIES = 120; // about a minute and a half
const MAX_RETRY_AFTER_S = 30; // after a longer wait the buyer decides whether to retry

const $ = (id) => document.getElementById(id);
const locale = () => (lang === 'zh' ? 'zh-CN' : 'en');
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Storage throws where it is forbidden; the page then starts without a session after a reload.
const store = {
  get(key) { try { return localStorage.getItem(key); } catch { return null; } },
  set(key, value) {
    try { value === null ? localStorage.removeItem(key) : localStorage.setItem(key, value); } catch { /* not stored */ }
  },
};

let lang = store.get('lang') ?? (navigator.language.startsWith('zh') ? 'zh' : 'en');
if (!(lang in WORDS)) lang = 'en';
let t = WORDS[lang];
let token = store.get('token');
let user = null;
let sales = null; // null: not loaded yet
let orders = null; // Map by id; null: not loaded yet
let clockOffset = 0; // server clock minus local clock, in ms
let trouble = null; // why the last poll failed
let codePhone = null; // the number the code was sent to
let challenge = null; // identifies the request for that code
const buying = new Set();
const cancelling = new Set();

// ---- Server

class Problem extends Error {
  /** `status` 0: no response. */
  constructor(status, body = {}, retryAfter = NaN) {
    super(body.title);
    Object.assign(this, { status, body, retryAfter });
  }

  get text() {
    if (this.status === 0) return t.unreachable;
    const details = (this.body.errors ?? []).map((error) => error.detail);
    return [this.body.title ?? t.failed, ...details].join(' · ');
  }
}

async function api(method, path, body, sent = token) {
  const headers = { 'Accept-Language': locale() };
  if (sent) headers.Authorization = `Bearer ${sent}`;
  if (body) headers['Content-Type'] = 'application/json';
  let response, data;
  try {
    response = await fetch(path, {
      method, headers,
      body: body && JSON.stringify(body),
      cache: 'no-store', // a cached server_time would be in the past
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    const text = await response.text();
    try { data = text ? JSON.parse(text) : {}; } catch { data = null; } // null: not JSON, such as a proxy's error page
  } catch {
    throw new Problem(0);
  }
  if (response.ok && data) return data;
  // A late 401 must not drop the token of a newer login.
  if (response.status === 401 && sent && sent === token) setToken(null);
  throw new Problem(response.status, data ?? {}, parseFloat(response.headers.get('Retry-After')));
}

const path = (...parts) => `/v1/${parts.map(encodeURIComponent).join('/')}`;

function setToken(value, owner = null) {
  [token, user, orders] = [value, owner, null];
  store.set('token', value);
  render();
}

// ---- Polling

let pollTimer = null;
let polling = false;
let pollDelay = POLL_MS;

async function poll() {
  clearTimeout(pollTimer);
  if (polling || document.hidden) return;
  polling = true;
  try {
    const sentAt = Date.now();
    const data = await api('GET', path('sales')); // public; the token is sent because browsing keeps the session alive
    clockOffset = Date.parse(data.server_time) - (sentAt + Date.now()) / 2;
    sales = data.sales;
    const waiting = [...(orders?.values() ?? [])].some((order) => order.status === 'pending');
    if (trouble || waiting) loadMine();
    trouble = null;
    pollDelay = POLL_MS;
  } catch (error) {
    trouble = error;
    pollDelay = Math.min(Math.max(pollDelay * 2, error.retryAfter * 1000 || 0), POLL_MAX_MS);
  }
  polling = false;
  if (!document.hidden) pollTimer = setTimeout(poll, pollDelay);
  render();
}

async function loadMine() {
  const owner = token;
  if (!owner) return;
  try {
    const [me, list] = await Promise.all([user ?? api('GET', path('me')), api('GET', path('orders'))]);
    if (token !== owner) return;
    user = me;
    orders ??= new Map();
    list.orders.forEach(upsertOrder);
    render();
  } catch (error) {
    if (error.status !== 0) fail(error); // no response: the poll already shows it
  }
}

/** Keeps the newest version: a list that was read before a purchase must not undo it. */
function upsertOrder(order) {
  orders ??= new Map();
  const known = orders.get(order.id);
  // An order that is not recorded yet has no time.
  const isNewer = !known?.updated_at || Date.parse(order.updated_at) >= Date.parse(known.updated_at);
  if (isNewer) orders.set(order.id, order);
}

// ---- Actions

async function buy(sale) {
  if (!token) {
    toast(t.loginFirst);
    return $('phone').focus();
  }
  if (buying.has(sale.id)) return;
  const buyer = token;
  buying.add(sale.id);
  render();
  try {
    const order = await buyWithRetries(sale, buyer);
    if (token !== buyer) return;
    upsertOrder(order);
    if (order.status === 'pending') return follow(order, buyer);
    toast(order.already ? t.already : t.bought);
    loadMine();
  } catch (error) {
    fail(error, true);
  } finally {
    buying.delete(sale.id);
    render();
    // A disabled button loses the focus; restore it unless another element has it.
    if (document.activeElement === document.body) cards.get(sale.id)?.querySelector('.buy').focus();
  }
}

/** Follows an order that is accepted and not recorded yet. It is not in the list of orders before that. */
async function follow(order, buyer) {
  toast(t.accepted);
  for (let tries = 0; tries < FOLLOW_TRIES; tries++) {
    await sleep(500 + Math.random() * 500); // jitter, so that clients do not ask at the same moment
    if (token !== buyer) return;
    let current;
    try {
      current = await api('GET', `${path('orders', order.id)}?sale=${encodeURIComponent(order.sale_id)}`);
    } catch {
      continue; // asked again
    }
    if (token !== buyer) return;
    upsertOrder(current);
    render();
    if (current.status === 'pending') continue;
    toast(['rejected', 'cancelled'].includes(current.status) ? t.notBought : t.bought);
    return loadMine();
  }
}

/** A retry is safe: the server returns the same order. */
async function buyWithRetries(sale, buyer) {
  for (let tries = 0; ; tries++) {
    try {
      return await api('POST', path('sales', sale.id, 'orders'));
    } catch (error) {
      const wait = error.retryAfter || 1;
      if (![429, 503].includes(error.status) || tries === BUY_RETRIES || wait > MAX_RETRY_AFTER_S) throw error;
      toast(t.retrying(Math.ceil(wait)));
      await sleep(wait * 1000 + Math.random() * 400); // jitter, so that clients do not retry at the same moment
      if (token !== buyer) throw error; // another user has logged in meanwhile
    }
  }
}

async function cancel(order) {
  if (cancelling.has(order.id) || !confirm(t.sure)) return;
  const owner = token;
  cancelling.add(order.id);
  render();
  try {
    const cancelled = await api('POST', path('orders', order.id, 'cancel'));
    if (token !== owner) return;
    upsertOrder(cancelled);
    toast(t.cancelled);
  } catch (error) {
    fail(error, true);
    if (error.status === 409) loadMine();
  } finally {
    cancelling.delete(order.id);
    render();
    if (document.activeElement === document.body && token) $('mine-title').focus();
  }
}

/** Submits a form with `action`, one submission at a time; a failure marks the input as invalid. */
function onSubmit(form, input, action) {
  const button = form.querySelector('button');
  input.addEventListener('input', () => input.removeAttribute('aria-invalid'));
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    button.disabled = true;
    try {
      await action(input.value.trim());
    } catch (error) {
      fail(error);
      if ([400, 401, 403, 422].includes(error.status)) input.setAttribute('aria-invalid', 'true');
      input.focus();
    } finally {
      button.disabled = false;
    }
  });
}

function forgetCode() {
  codePhone = challenge = null;
  $('code').value = '';
  $('code-note').textContent = '';
  $('code-form').hidden = true;
}

/** Requests a code; solves a puzzle first if the shop requires one. */
async function requestCode(phone) {
  const request = (proof) => api('POST', path('login', 'codes'), { phone, ...proof });
  try {
    return await request();
  } catch (error) {
    if (error.body?.code !== 'proof_required') throw error;
  }
  $('code-note').textContent = t.solving;
  const { puzzle, bits } = await api('GET', path('login', 'puzzle'));
  return request({ puzzle, answer: await solve(puzzle, phone, bits) });
}

/** The first number for which the SHA-256 of `puzzle:phone:number` begins with `bits` zero bits. */
async function solve(puzzle, phone, bits) {
  const encoder = new TextEncoder();
  const isSolved = async (answer) => {
    const hash = await crypto.subtle.digest('SHA-256', encoder.encode(`${puzzle}:${phone}:${answer}`));
    return new DataView(hash).getUint32(0) / 2 ** (32 - bits) < 1;
  };
  for (let from = 0; ; from += 256) { // in batches: each hash is an asynchronous task
    const answers = Array.from({ length: 256 }, (_, n) => from + n);
    const solved = await Promise.all(answers.map(isSolved));
    if (solved.includes(true)) return String(answers[solved.indexOf(true)]);
  }
}

onSubmit($('phone-form'), $('phone'), async (phone) => {
  const sent = await requestCode(phone).finally(() => { $('code-note').textContent = ''; });
  if ($('phone').value.trim() !== phone) return;
  codePhone = phone;
  challenge = sent.challenge;
  $('code-form').hidden = false;
  $('code').value = sent.demo_code ?? '';
  $('code-note').textContent = sent.demo_code ? t.demoCode(sent.demo_code) : t.codeSent;
  $('code').focus();
});
$('phone').addEventListener('input', forgetCode);

onSubmit($('code-form'), $('code'), async (code) => {
  const session = await api('POST', path('login'), { phone: codePhone, code, challenge });
  forgetCode();
  setToken(session.token, session.user);
  $('mine-title').focus({ preventScroll: true });
  loadMine();
});

$('log-out').addEventListener('click', () => {
  const done = api('DELETE', path('session')); // reads the token before it is removed
  setToken(null);
  $('to-login').focus();
  done.catch((error) => { if (error.status !== 401) fail(error); });
});

$('language').addEventListener('click', () => {
  lang = lang === 'zh' ? 'en' : 'zh';
  t = WORDS[lang];
  store.set('lang', lang);
  render();
});

// ---- Toasts

function toast(text, region = 'toast-status') {
  const line = document.createElement('p');
  line.textContent = text;
  $('toast-status').replaceChildren();
  $('toast-alert').replaceChildren();
  $(region).append(line);
  setTimeout(() => line.remove(), 7_000);
}

function fail(error, askLogin = false) {
  if (!(error instanceof Problem)) console.error(error);
  toast(error.text ?? t.failed, 'toast-alert');
  if (askLogin && error.status === 401) $('phone').focus();
}

// ---- Rendering: updates in place, so that a poll keeps the focus and the scroll position

const cards = new Map();
const rows = new Map();

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Updates `list` to show `items`, one element per id; new elements are cloned from the template. */
function sync(list, template, known, items, update) {
  for (const [id, element] of known) {
    if (!items.some((item) => item.id === id)) {
      element.remove();
      known.delete(id);
    }
  }
  items.forEach((item, at) => {
    let element = known.get(item.id);
    if (!element) {
      element = template.content.firstElementChild.cloneNode(true);
      known.set(item.id, element);
    }
    if (list.children[at] !== element) list.insertBefore(element, list.children[at] ?? null);
    update(element, item);
  });
}

const yuan = (cents) => `¥${(cents / 100).toFixed(2)}`;

function span(ms) {
  const seconds = Math.ceil(ms / 1000);
  const two = (n) => String(Math.floor(n)).padStart(2, '0');
  const days = Math.floor(seconds / 86_400);
  return (days ? t.days(days) : '') + [(seconds % 86_400) / 3600, (seconds % 3600) / 60, seconds % 60].map(two).join(':');
}

function renderSale(card, sale) {
  const now = Date.now() + clockOffset;
  const begin = Date.parse(sale.begin);
  const end = Date.parse(sale.end);
  // The local clock opens and closes a sale between two polls, so that the buyer does not lose up to two seconds.
  let state = sale.state;
  if (now >= end) state = 'ended';
  else if (state === 'not_started' && now >= begin) state = 'on';

  const find = (selector) => card.querySelector(selector);
  card.dataset.state = state;
  set(find('.badge'), t.state[state] ?? state);
  set(find('.timer'), state === 'ended' ? '' : now < begin ? t.begins(span(begin - now)) : t.ends(span(end - now)));
  set(find('h3'), sale.title);
  find('progress').max = Math.max(sale.total, 1);
  find('progress').value = sale.remaining;
  set(find('.left'), t.left(sale.remaining, sale.total));
  set(find('.price'), yuan(sale.price_cents));
  set(find('.worth-label'), t.worth);
  set(find('.worth'), yuan(sale.worth_cents));
  const pending = buying.has(sale.id);
  const button = find('.buy');
  set(button, pending ? t.buying : t.buy);
  button.setAttribute('aria-label', `${button.textContent} ${sale.title}`);
  button.disabled = pending || state !== 'on';
  button.onclick = () => buy(sale);
}

function renderOrder(row, order) {
  const find = (selector) => row.querySelector(selector);
  const title = sales?.find((sale) => sale.id === order.sale_id)?.title ?? t.aSale(order.sale_id);
  row.dataset.state = order.status;
  set(find('h3'), title);
  set(find('.badge'), t.state[order.status] ?? order.status);
  set(find('.price'), yuan(order.price_cents));
  find('time').dateTime = order.created_at;
  set(find('time'), new Date(order.created_at).toLocaleString(locale(), { dateStyle: 'medium', timeStyle: 'short' }));
  const button = find('.cancel');
  set(button, t.cancel);
  button.setAttribute('aria-label', `${t.cancel} ${title}`);
  button.hidden = order.status !== 'unpaid';
  button.disabled = cancelling.has(order.id);
  button.onclick = () => cancel(order);
}

function renderSales() {
  set($('no-sales'), sales?.length ? '' : sales ? t.noSales : trouble ? '' : t.loading);
  sync($('sales'), $('sale-template'), cards, sales ?? [], renderSale);
}

function render() {
  document.documentElement.lang = locale();
  for (const element of document.querySelectorAll('[data-t]')) set(element, t[element.dataset.t]);
  set($('language'), lang === 'zh' ? 'English' : '中文');
  $('language').lang = lang === 'zh' ? 'en' : 'zh-CN';
  set($('trouble'), !trouble ? '' : trouble.body?.title ?? t.unreachable);

  set($('who'), user?.nickname ?? '');
  $('to-login').hidden = $('login').hidden = Boolean(token);
  $('log-out').hidden = $('mine').hidden = !token;

  renderSales();
  const mine = [...(orders?.values() ?? [])].sort((a, b) => Date.parse(b.created_at) - Date.parse(a.created_at));
  set($('no-orders'), mine.length ? '' : orders ? t.noOrders : t.loading);
  sync($('orders'), $('order-template'), rows, mine, renderOrder);
}

// ---- Start

document.addEventListener('visibilitychange', () => {
  clearTimeout(pollTimer);
  if (document.hidden) return;
  poll();
  loadMine();
});
addEventListener('storage', (event) => { // another tab logged in or out
  if (event.key !== 'token' || event.newValue === token) return;
  setToken(event.newValue);
  loadMine();
});
setInterval(() => { if (!document.hidden) renderSales(); }, 500);

render();
poll();
loadMine();
