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
    changed: (title, status) => `${title}: ${status}`,
    cancel: 'Cancel', sure: (title) => `Cancel the order for “${title}”?`,
    pay: 'Pay (test)', payWithin: (time) => `Pay within ${time}`, payOver: 'The payment deadline has passed.',
    cannotPay: 'This shop does not take payments on this page.',
    showCode: 'Show code', hideCode: 'Hide code', redeemCode: (code) => `Code for the shop: ${code}`,
    history: 'History',
    unreachable: 'Cannot reach the server.', failed: 'Something went wrong.',
    state: {
      not_started: 'Soon', on: 'On now', sold_out: 'Sold out', paused: 'Paused', ended: 'Ended',
      pending: 'Processing', unpaid: 'Unpaid', paid: 'Paid', redeemed: 'Used', cancelled: 'Cancelled',
      refunding: 'Refunding', refunded: 'Refunded', rejected: 'Rejected',
    },
    reason: {
      requested: 'requested', operator: 'decision of the shop', expired: 'not paid in time',
      payment: 'payment received', late_payment: 'payment came after the order had ended', payment_returned: 'its payment is returned',
      already_has: 'you already have an order', sold_out: 'sold out', epoch: 'the sale was reset',
      discarded: 'could not be recorded',
      bought_before: 'bought before',
    },
    actor: {
      buyer: 'by you', system: 'by the system', operator: 'by the shop', provider: 'by the payment provider',
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
    changed: (title, status) => `${title}：${status}`,
    cancel: '取消', sure: (title) => `确定取消“${title}”的订单吗？`,
    pay: '支付（测试）', payWithin: (time) => `剩余支付时间 ${time}`, payOver: '已超过支付时限。',
    cannotPay: '本页面不支持支付。',
    showCode: '查看核销码', hideCode: '隐藏核销码', redeemCode: (code) => `核销码：${code}`,
    history: '订单记录',
    unreachable: '无法连接服务器。', failed: '出错了。',
    state: {
      not_started: '即将开始', on: '进行中', sold_out: '已抢光', paused: '已暂停', ended: '已结束',
      pending: '处理中', unpaid: '待支付', paid: '已支付', redeemed: '已使用', cancelled: '已取消',
      refunding: '退款中', refunded: '已退款', rejected: '未成功',
    },
    reason: {
      requested: '用户申请', operator: '商家处理', expired: '超时未支付',
      payment: '支付成功', late_payment: '订单结束后才到账', payment_returned: '款项将退回',
      already_has: '已有订单', sold_out: '已售罄', epoch: '活动已重置',
      discarded: '无法入账',
      bought_before: '已下过单',
    },
    actor: {
      buyer: '本人', system: '系统', operator: '商家', provider: '支付渠道',
    },
  },
};

const POLL_MS = 2_000;
const POLL_MAX_MS = 10_000;
const TIMEOUT_MS = 10_000;
const RELOAD_MS = 15_000; // how often the orders are loaded while one of them can change and is not followed
const IDLE_TIMEOUT_MS = 40_000; // of a stream; the server sends a keep-alive every 15 s
const MAX_STREAMS = 2; // over HTTP/1.1 a browser has at most six connections to a server, in all tabs together
const MAX_NOT_FOUND = 10; // after so many 404 in a row an order is removed from the page
const BUY_RETRIES = 3;
const MAX_RETRY_AFTER_S = 30; // after a longer wait the buyer decides whether to retry

/** Every step of an order leads to a status with a higher rank. */
const RANK = {
  pending: 0, unpaid: 1, paid: 2, cancelled: 2, rejected: 2, redeemed: 3, refunding: 3, refunded: 4,
};
const ENDED = ['redeemed', 'cancelled', 'refunded', 'rejected'];

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
let loadedAt = 0; // when the orders were last asked for
let canPay = null; // whether orders can be paid on this page; null: not known yet
const buying = new Set(); // ids of sales
const acting = new Set(); // ids of orders with an action in progress
const codes = new Map(); // the redeem codes that are shown, by id of order
const histories = new Map(); // the histories that are shown, by id of order; empty until loaded
const followers = new Map(); // an AbortController for each order that is followed

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

/** The value of a JSON text; null if it is not JSON, such as a proxy's error page. */
function parse(text) {
  try { return text ? JSON.parse(text) : {}; } catch { return null; }
}

/** Throws a `Problem` unless the request succeeds. */
async function request(method, path, body, signal = AbortSignal.timeout(TIMEOUT_MS)) {
  const sent = token;
  const headers = { 'Accept-Language': locale() };
  if (sent) headers.Authorization = `Bearer ${sent}`;
  if (body) headers['Content-Type'] = 'application/json';
  let response, data;
  try {
    response = await fetch(path, {
      method, headers, signal,
      body: body && JSON.stringify(body),
      cache: 'no-store', // a cached server_time would be in the past
    });
    if (response.ok) return response;
    data = parse(await response.text());
  } catch {
    throw new Problem(0);
  }
  // A late 401 must not drop the token of a newer login.
  if (response.status === 401 && sent && sent === token) setToken(null);
  throw new Problem(response.status, data ?? {}, parseFloat(response.headers.get('Retry-After')));
}

async function api(method, path, body) {
  const response = await request(method, path, body);
  const text = await response.text().catch(() => { throw new Problem(0); });
  const data = parse(text);
  if (!data) throw new Problem(response.status);
  return data;
}

const path = (...parts) => `/v1/${parts.map(encodeURIComponent).join('/')}`;

function setToken(value, owner = null) {
  [token, user, orders] = [value, owner, null];
  codes.clear();
  histories.clear();
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
    if (trouble || isOutdated()) loadMine();
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
  loadedAt = Date.now();
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

/** Whether the orders must be loaded again because one of them can change and is not followed. */
function isOutdated() {
  if (Date.now() - loadedAt < RELOAD_MS) return false;
  return !orders || [...orders.values()].some((order) => !ENDED.includes(order.status) && !followers.has(order.id));
}

/** Keeps the newest state: a list that was read before a purchase must not undo it. */
function upsertOrder(order) {
  orders ??= new Map();
  const known = orders.get(order.id);
  if (known && RANK[order.status] < RANK[known.status]) return;
  orders.set(order.id, { ...known, ...order }); // the response to buying has no pay_by
  if (order.status === 'unpaid') checkPay(order.id);
  if (!known || known.status === order.status) return;
  if (order.status !== 'paid') codes.delete(order.id);
  if (histories.has(order.id)) loadHistory(order.id);
  if (known.status === 'pending') toast(['rejected', 'cancelled'].includes(order.status) ? t.notBought : t.bought);
  else toast(t.changed(titleOf(order), t.state[order.status] ?? order.status));
}

let checkingPay = false;

/** Finds out whether orders can be paid here: only where the route exists, a GET is refused with 405. */
async function checkPay(id) {
  if (canPay !== null || checkingPay) return;
  checkingPay = true;
  try {
    await api('GET', path('orders', id, 'pay'));
  } catch (error) {
    if (error.status === 405) canPay = true;
    else if (error.status === 404) canPay = false;
  }
  checkingPay = false;
  render();
}

// ---- Following orders

/** Whether a change is expected soon. A paid order is redeemed while its owner shows the code. */
const isFollowed = (order) => ['pending', 'unpaid', 'refunding'].includes(order.status) || codes.has(order.id);

const newestFirst = () => [...(orders?.values() ?? [])].sort((a, b) => Number(BigInt(b.id) - BigInt(a.id)));

function followOrders() {
  const wanted = document.hidden ? [] : newestFirst().filter(isFollowed).slice(0, MAX_STREAMS).map((order) => order.id);
  for (const [id, follower] of followers) {
    if (wanted.includes(id)) continue;
    followers.delete(id);
    follower.abort();
  }
  for (const id of wanted) if (!followers.has(id)) follow(id);
}

/** Follows an order until its follower is aborted. */
async function follow(id) {
  const follower = new AbortController();
  const { signal } = follower;
  followers.set(id, follower);
  for (let notFound = 0; !signal.aborted;) {
    let pause = 1_000;
    try {
      for await (const order of states(orders.get(id), signal)) {
        if (signal.aborted) return;
        notFound = 0;
        upsertOrder(order);
        render();
      }
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      pause = Math.max(POLL_MS, error.retryAfter * 1000 || 0);
      if (error.status === 404 && ++notFound === MAX_NOT_FOUND) {
        orders.delete(id);
        render();
        return fail(error);
      }
    }
    await sleep(pause * (1 + Math.random())); // jitter, so that clients do not ask at the same moment
  }
}

/** The states of an order, from a stream of events; only the present state if there is no stream. */
async function* states(order, signal) {
  try {
    yield* events(order, signal);
  } catch (error) {
    if (signal.aborted || ![0, 503].includes(error.status)) throw error;
    yield await api('GET', `${path('orders', order.id)}?${new URLSearchParams({ sale: order.sale_id })}`);
  }
}

/** The events of an order until the server ends the stream. `EventSource` cannot send a token. */
async function* events(order, signal) {
  const connection = new AbortController();
  const close = () => connection.abort();
  let timer = setTimeout(close, TIMEOUT_MS);
  signal.addEventListener('abort', close);
  try {
    // The number of streams with `follow` is limited; without it, the stream ends when a pending order is recorded.
    const query = new URLSearchParams({ sale: order.sale_id, follow: String(order.status !== 'pending') });
    const response = await request('GET', `${path('orders', order.id, 'events')}?${query}`, undefined, connection.signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = '';
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(close, IDLE_TIMEOUT_MS);
      const blocks = (text + value).split('\n\n');
      text = blocks.pop(); // not complete yet
      for (const line of blocks.flatMap((block) => block.split('\n'))) {
        if (line.startsWith('data:')) yield JSON.parse(line.slice('data:'.length));
      }
    }
  } catch (error) {
    throw error instanceof Problem ? error : new Problem(0);
  } finally {
    clearTimeout(timer);
    signal.removeEventListener('abort', close);
    close();
  }
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
    if (order.status === 'pending') return toast(t.accepted);
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

/** Sends an action on an order, one at a time. `button` gets the focus back. The result is undefined after a failure. */
async function act(order, action, button) {
  if (acting.has(order.id)) return undefined;
  const owner = token;
  acting.add(order.id);
  render();
  try {
    const result = await api('POST', path('orders', order.id, action));
    return token === owner ? result : undefined;
  } catch (error) {
    if (action === 'pay' && error.body?.code === 'not_found') {
      canPay = false;
      toast(t.cannotPay, 'toast-alert');
    } else {
      fail(error, true);
    }
    if ([409, 503].includes(error.status)) loadMine(); // the page may be behind
    return undefined;
  } finally {
    acting.delete(order.id);
    render();
    if (document.activeElement === document.body && token) focusButton(rows.get(order.id), button);
  }
}

/** Focuses a button of an order; if it is hidden, the button for the history. */
function focusButton(row, selector) {
  const button = row?.querySelector(selector);
  (button && !button.hidden ? button : row?.querySelector('.toggle-history') ?? $('mine-title')).focus();
}

async function pay(order) {
  const paid = await act(order, 'pay', '.pay');
  if (!paid) return;
  upsertOrder(paid);
  render();
}

async function cancel(order) {
  if (acting.has(order.id) || !confirm(t.sure(titleOf(order)))) return;
  const cancelled = await act(order, 'cancel', '.cancel');
  if (!cancelled) return;
  upsertOrder(cancelled);
  render();
}

async function toggleCode(order) {
  if (codes.delete(order.id)) return render();
  const redeem = await act(order, 'redeem-code', '.toggle-code');
  if (redeem && orders?.get(order.id)?.status === 'paid') codes.set(order.id, redeem.code);
  render();
}

function toggleHistory(order) {
  if (histories.delete(order.id)) return render();
  loadHistory(order.id);
}

async function loadHistory(id) {
  const shown = histories.get(id) ?? [];
  histories.set(id, shown);
  render();
  try {
    const { events: steps } = await api('GET', path('orders', id, 'history'));
    // It only grows, so the longest is the newest. It may have been closed meanwhile.
    if (steps.length > (histories.get(id)?.length ?? Infinity)) histories.set(id, steps);
  } catch (error) {
    if (!shown.length) histories.delete(id);
    fail(error, true);
  }
  render();
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

const dateFormats = new Map();

function formatTime(time, timeStyle) {
  const key = `${lang} ${timeStyle}`;
  if (!dateFormats.has(key)) dateFormats.set(key, new Intl.DateTimeFormat(locale(), { dateStyle: 'medium', timeStyle }));
  return dateFormats.get(key).format(new Date(time));
}

const saleOf = (order) => sales?.find((sale) => sale.id === order.sale_id);
const titleOf = (order) => saleOf(order)?.title ?? t.aSale(order.sale_id);

function renderOrder(row, order) {
  const find = (selector) => row.querySelector(selector);
  const title = titleOf(order);
  // A pending order has neither a price nor a time.
  const price = order.price_cents ?? saleOf(order)?.price_cents;
  const unpaid = order.status === 'unpaid';
  // NaN without a limit, and until the server's clock is known.
  const remaining = sales && unpaid ? Date.parse(order.pay_by) - (Date.now() + clockOffset) : NaN;
  const code = order.status === 'paid' ? codes.get(order.id) : undefined;
  const history = histories.get(order.id);

  row.dataset.state = order.status;
  set(find('h3'), title);
  set(find('.badge'), t.state[order.status] ?? order.status);
  set(find('.price'), price === undefined ? '' : yuan(price));
  find('time').dateTime = order.created_at ?? '';
  set(find('time'), order.created_at ? formatTime(order.created_at, 'short') : '');
  set(find('.timer'), Number.isNaN(remaining) ? '' : remaining > 0 ? t.payWithin(span(remaining)) : t.payOver);
  set(find('.code'), code ? t.redeemCode(code.replace(/(.{4})(?=.)/g, '$1-')) : '');

  const focused = document.activeElement;
  const button = (selector, text, isShown, action) => {
    const element = find(selector);
    set(element, text);
    element.setAttribute('aria-label', `${text} ${title}`);
    element.hidden = !isShown;
    element.onclick = () => action(order);
    return element;
  };
  for (const element of [
    button('.pay', t.pay, unpaid && canPay && !(remaining <= 0), pay),
    button('.toggle-code', code ? t.hideCode : t.showCode, order.status === 'paid', toggleCode),
    button('.cancel', t.cancel, unpaid, cancel),
  ]) element.disabled = acting.has(order.id);
  button('.toggle-history', t.history, order.status !== 'pending', toggleHistory)
    .setAttribute('aria-expanded', String(Boolean(history)));
  // A hidden button loses the focus.
  if (focused?.hidden && row.contains(focused)) focusButton(row, '.toggle-history');

  find('.history').hidden = !history?.length;
  renderHistory(find('.history'), history ?? []);
}

function renderHistory(list, steps) {
  while (list.children.length > steps.length) list.lastElementChild.remove();
  steps.forEach((step, at) => {
    const line = list.children[at] ?? list.appendChild($('step-template').content.firstElementChild.cloneNode(true));
    const notes = [t.reason[step.reason] ?? step.reason, t.actor[step.by] ?? step.by];
    set(line.querySelector('strong'), t.state[step.to] ?? step.to);
    line.querySelector('time').dateTime = step.at;
    set(line.querySelector('time'), formatTime(step.at, 'medium'));
    set(line.querySelector('span'), notes.filter(Boolean).join(' · '));
  });
}

function renderSales() {
  set($('no-sales'), sales?.length ? '' : sales ? t.noSales : trouble ? '' : t.loading);
  sync($('sales'), $('sale-template'), cards, sales ?? [], renderSale);
}

function renderOrders() {
  const mine = newestFirst();
  set($('no-orders'), mine.length ? '' : orders ? t.noOrders : t.loading);
  sync($('orders'), $('order-template'), rows, mine, renderOrder);
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
  renderOrders();
  followOrders();
}

// ---- Start

document.addEventListener('visibilitychange', () => {
  clearTimeout(pollTimer);
  followOrders();
  if (document.hidden) return;
  poll();
  loadMine();
});
addEventListener('storage', (event) => { // another tab logged in or out
  if (event.key !== 'token' || event.newValue === token) return;
  setToken(event.newValue);
  loadMine();
});
setInterval(() => {
  if (document.hidden) return;
  renderSales();
  renderOrders();
}, 500);

render();
poll();
loadMine();
